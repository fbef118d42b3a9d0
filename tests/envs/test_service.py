"""The service environment: what succeeds, what each broken rule costs, and how the customer behaves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import agentrl
from agentrl.envs.builtin.service import DIFFICULTIES, ServiceEnv
from agentrl.envs.builtin.service.customer import PATIENCE, Customer
from agentrl.envs.builtin.service.shop import Shop
from agentrl.envs.builtin.service.tasks import ALLOWED_STATUS, WISHES, granted, make_task
from agentrl.errors import ConfigError
from agentrl.types import StopReason
from tests.envs.playing import LIMITS, first_prompt_tokens, play
from tests.envs.service_agents import call, change, good, hasty, obliging, refusing


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_oracle_succeeds_at_every_task(difficulty, split):
    seen = set()
    # Two wishes of a stubborn customer are more than 1,920 tokens of the demo model's.
    limits = replace(LIMITS, max_context_len=2600) if difficulty == "hard" else LIMITS
    for index in range(25):
        (t,) = play(ServiceEnv(difficulty=difficulty), good, index=index, split=split, limits=limits)
        assert (t.success, t.reward, t.stop_reason) == (True, 1.0, StopReason.DONE), t.messages
        assert t.rewards == {"database": 1.0, "customer": 1.0, "rules": 1.0} and t.info["violations"] == []
        seen |= set(t.info["category"].split("+"))
    assert seen == set(WISHES)


def test_normal_tasks_fit_into_the_demo_models_turns():
    assert max(play(ServiceEnv(), good, index=i)[0].num_turns for i in range(20)) <= 8


@pytest.mark.parametrize("policy", [lambda env: "", hasty, refusing, obliging])
def test_bad_agents_fail(policy):
    played = [play(ServiceEnv(), policy, index=i)[0] for i in range(20)]
    wins = [t.info["category"] for t in played if t.success]
    # Obliging agents do well until they should refuse.
    assert not wins if policy is not obliging else "refuse" not in wins
    assert all(t.success or t.reward == 0.0 for t in played)


def test_silence_makes_the_customer_give_up():
    (t,) = play(ServiceEnv(), lambda env: "")
    assert t.num_turns == PATIENCE and t.messages[-1]["role"] == "assistant" and t.stop_reason is StopReason.DONE
    assert t.rewards["customer"] == 0.0


def task_of(kind, *, difficulty="easy", reason=None):
    for index in range(300):
        env = ServiceEnv(difficulty=difficulty)
        _, info = env.reset(options={"split": "train", "index": index})
        wish = env.row["wishes"][0]
        status = env.shop.order(wish["order"])["status"]
        if info["category"] == kind and reason in (None, status):
            return env
    raise AssertionError


def serve(env, *actions):
    for action in actions:
        step = env.step(action)
    return step


def finish(env):
    while True:
        step = env.step(good(env))
        if step[2]:
            return step[4]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ("identify", ("look", "confirm")),
        ("look", ("identify", "confirm")),
        ("confirm", ("identify", "look")),
    ],
)
def test_a_change_that_breaks_a_rule_is_noticed(rule, kept):
    env = task_of("cancel")
    order = env.customer.wish["order"]
    steps = {
        "identify": call("find_customer", email=env.row["email"]),
        "look": call("get_order", order=order),
        "confirm": f"Shall I cancel order {order}?",
    }
    serve(env, *(steps[name] for name in kept), change(env.customer.wish))
    assert env.violations == [rule]
    info = finish(env)
    assert info["success"] is False and info["rewards"] == {"database": 1.0, "customer": 1.0, "rules": 0.0}


def test_what_may_not_be_done_breaks_a_rule_though_the_customer_is_pleased():
    for reason, rule in (("shipped", "status"), ("delivered", "stock")):
        env = task_of("refuse", reason=reason)
        wish = env.customer.wish
        details = " ".join(str(wish.get(name, "")) for name in ("address", "new_item"))
        serve(env, call("find_customer", email=env.row["email"]), call("get_order", order=wish["order"]))
        assert serve(env, f"Shall I change order {wish['order']} {details}?")[0] == "Yes, please do that."
        observation, reward, over, _, info = serve(env, change(wish), f"Done. {wish.get('amount', '')}")
        assert observation == "Thank you. Goodbye." and over and reward == 0.0
        assert info["violations"] == [rule] and info["rewards"]["database"] == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_no_wish_makes_another_impossible(seed):
    """What is sold out so that one wish must be refused was once what the other wished for."""
    for index in range(700 * seed, 700 * (seed + 1)):
        row = make_task(np.random.default_rng(index), "train", wishes=2)
        for wish in row["wishes"]:
            if wish["kind"] == "question":
                continue
            order, new = row["shop"]["orders"][wish["order"]], wish.get("new_item")
            possible = order["status"] == ALLOWED_STATUS[wish["kind"]]
            possible &= new is None or row["shop"]["catalog"][new]["stock"] > 0
            assert possible is wish["allowed"], (index, row["wishes"])


def test_an_amount_among_many_guesses_is_not_told():
    env = task_of("question")
    wish = env.customer.wish
    guesses = " ".join(f"{number / 2:.2f}" for number in range(20, 800))
    assert f"{wish['amount']:.2f}" in guesses
    assert serve(env, guesses)[0] == f"I do not follow. I want to know the total of order {wish['order']}."
    assert serve(env, f"Order {wish['order']}: {wish['amount']:.2f} in all.")[2]


def test_orders_of_others_and_items_of_another_kind():
    env = task_of("cancel")
    other = next(n for n, o in env.shop.state["orders"].items() if o["customer"] != env.row["email"])
    serve(env, call("cancel_order", order=other))
    assert {"owner", "identify", "look", "confirm"} <= set(env.violations)
    env = task_of("exchange")
    wish = env.customer.wish
    new = next(name for name in env.shop.state["catalog"] if name.split()[1] != wish["item"].split()[1])
    serve(env, call("exchange_item", order=wish["order"], item=wish["item"], new_item=new))
    assert "kind" in env.violations


def test_a_refusal_unseen_is_no_service():
    env = task_of("refuse")
    _, reward, over, _, info = serve(env, refusing(env))
    assert over and reward == 0.0 and info["violations"] == ["identify", "look"]
    assert info["rewards"] == {"database": 1.0, "customer": 1.0, "rules": 0.0}


def test_the_amount_must_be_told():
    env = task_of("cancel")
    wish = env.customer.wish
    serve(env, call("find_customer", email=env.row["email"]), call("get_order", order=wish["order"]))
    serve(env, f"Shall I cancel order {wish['order']}?", change(wish))
    assert serve(env, "It is cancelled.")[0] == "And what amount is it, exactly?"
    assert serve(env, f"You get {wish['amount']:.2f} back.")[4]["success"] is True


def test_the_customer_agrees_to_nothing_but_its_wish():
    env = task_of("address")
    wish = env.customer.wish
    assert "Please name the order" in serve(env, f"Shall I change order {wish['order']}?")[0]
    assert not env.customer.agreed
    other = next(n for n in env.shop.state["orders"] if n != wish["order"])
    assert "not what I asked for" in serve(env, f"Shall I send order {other} to {wish['address']}?")[0]
    assert serve(env, f"Order #{wish['order']} to {wish['address'].upper()}: shall I?")[0] == "Yes, please do that."


@pytest.mark.parametrize(
    ("said", "facts"),
    [
        ("What is your e-mail address?", {"email"}),
        ("Please tell me the order number and your email.", {"order", "email"}),
        ("Could you share your email? Which order is it? Which item do you want?", {"email", "order", "item"}),
        ("I need the order id", {"order"}),
        ("Good morning.", set()),
    ],
)  # fmt: skip
def test_the_customer_tells_what_it_is_asked_for(said, facts):
    env = task_of("exchange", difficulty="normal")
    answer = serve(env, said)[0]
    assert env.customer.known == facts
    wish = env.row["wishes"][0]
    assert (env.row["email"] in answer) == ("email" in facts)
    assert (wish["order"] in answer) == ("order" in facts)
    assert (wish["new_item"] in answer) == ("item" in facts)
    assert answer.startswith("I do not follow.") == (not facts)


def test_a_polite_question_after_a_refusal_is_no_offer():
    env = task_of("refuse")
    wish = env.customer.wish
    words = f"I cannot change order {wish['order']}: it was shipped. Do you want me to do anything else for you?"
    assert serve(env, words)[0] == "I see. Goodbye."


def test_hard_customers_insist_and_have_two_wishes():
    for index in range(40):
        env = ServiceEnv(difficulty="hard")
        env.reset(options={"split": "train", "index": index})
        if not env.row["wishes"][0]["allowed"]:
            break
    answers = [serve(env, refusing(env))[0] for _ in range(3)]
    assert answers[0] == answers[1] == "It is important to me. Can you not make an exception?"
    assert answers[2].startswith("I see. And another thing: I want")
    assert env.customer.closed == 1 and env.customer.known == set()


def test_refusing_what_is_allowed_fails():
    env = task_of("cancel")
    serve(env, call("find_customer", email=env.row["email"]), call("get_order", order=env.customer.wish["order"]))
    observation, reward, over, _, info = serve(env, refusing(env))
    assert observation == "That is a pity. Goodbye." and over and reward == 0.0
    assert info["rewards"] == {"database": 0.0, "customer": 0.0, "rules": 1.0}


def test_parts_can_earn():
    env = task_of("refuse")
    env.partial_credit = 0.3
    assert serve(env, refusing(env))[1] == pytest.approx(0.2)
    (t,) = play(ServiceEnv(partial_credit=1.0), good)
    assert t.reward == pytest.approx(1.0)


def test_tools_explain_what_they_cannot_do():
    env = task_of("cancel")
    wish = env.customer.wish
    for action, text in (
        (call("find_customer", email="nobody@mail.com"), "no customer has the e-mail 'nobody@mail.com'"),
        (call("get_order", order="12"), "there is no order '12'"),
        (call("get_items", kind="ship"), "kinds are bag, chair"),
        (call("exchange_item", order=wish["order"], item="pink ship", new_item="red lamp"), "has no 'pink ship'"),
        (call("change_address", order=wish["order"], address="  "), "the address is empty"),
        (call("cancel_order", number=wish["order"]), "Error (invalid_arguments)"),
        (call("cancel_order", order=wish["order"]) + call("cancel_order", order=wish["order"]), "cancelled already"),
    ):
        assert text in serve(env, action)[0]
    assert "lamp" in serve(env, call("get_items", kind="Lamps"))[0]


def test_tasks_are_seeded_winnable_and_disjoint():
    env = ServiceEnv()
    people = {}
    for split in ("train", "test"):
        rows = [env.reset(options={"split": split, "index": i}) and env.row for i in range(60)]
        again = [ServiceEnv().reset(options={"split": split, "index": i})[0] for i in range(60)]
        assert [r["prompt"] for r in rows] == again
        people[split] = {name for r in rows for name in r["shop"]["customers"]}
        for row in rows:
            (wish,) = row["wishes"]
            assert granted(Shop(row["goal"]), wish) == (wish["allowed"] and wish["kind"] != "question")
            assert row["shop"]["orders"][wish["order"]]["customer"] == row["email"]
            assert wish.get("amount", 1) > 0
    assert not people["train"] & people["test"]


def test_prompts_are_short():
    assert max(first_prompt_tokens(ServiceEnv(difficulty="easy"), index=i) for i in range(20)) < 900


@pytest.mark.parametrize("wrong", [{"difficulty": "harsh"}, {"partial_credit": 2}, {"partial_credit": "x"}])
def test_arguments_are_checked(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServiceEnv(**wrong)


def test_the_customer_survives_any_text():
    env = task_of("exchange")
    for text in ("\ud800\x00" * 50, "9" * 5000, "? " * 3000, "<tool_call>" * 30, "confirm " * 500):
        row = env.row
        words, _ = Customer(row, Shop(row["shop"]), open_with_all=False, insist=0).reply(text)
        assert words


def test_it_is_built_in():
    env = agentrl.make("service", difficulty="hard", max_turns=30)
    _, info = env.reset(seed=0)
    assert "+" in info["category"] and len(info["tools"]) == 6
