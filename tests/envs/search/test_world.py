from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from agentrl.envs.builtin.search import names, world
from agentrl.envs.builtin.search.world import World, get_world, world_index


def test_same_seed_same_world_and_another_seed_another():
    first, again, other = World(3, num_people=2000), World(3, num_people=2000), World(4, num_people=2000)
    assert first.passages == again.passages
    assert first.passages != other.passages


def test_the_world_of_seed_0_never_changes():
    digest = hashlib.sha256("\n".join(p.contents for p in get_world(0).passages).encode()).hexdigest()
    questions = "\n".join(get_world(0).question("test", i).text for i in range(1024))
    assert digest[:16] == "c6a810429c43d036"
    assert hashlib.sha256(questions.encode()).hexdigest()[:16] == "ff0d3c023f9719ed"


def test_a_world_is_large():
    counts = Counter(kind for kind, _ in get_world(0).entities for _ in get_world(0).entities[kind, _])
    assert counts["person"] == 30_000 and counts["company"] == 4_000 and counts["place"] == 3_200
    assert len(get_world(0).facts) == len(get_world(0).passages) == 37_200


def test_no_entity_of_a_test_question_occurs_in_a_training_question():
    seen: dict[str, set[str]] = {split: set() for split in world.SPLITS}
    for split, entities in seen.items():
        for i in range(world.NUM_QUESTIONS[split]):
            entities.update(get_world(0).question(split, i).chain)
    assert seen["train"] and seen["test"]
    assert not seen["train"] & seen["test"]


def test_every_fact_stays_inside_its_split():
    for subject, facts in get_world(0).facts.items():
        for value in facts.values():
            assert world.split_of(value) == world.split_of(subject)
            assert value != subject


def test_splits_do_not_depend_on_the_seed():
    one, other = World(0, num_people=3000), World(1, num_people=3000)
    shared = set(one.entities["person", "test"]) & {n for s in world.SPLITS for n in other.entities["person", s]}
    assert shared and shared <= set(other.entities["person", "test"])


def test_test_questions_are_all_different_and_in_the_stated_proportion():
    questions = [get_world(0).question("test", i) for i in range(1024)]
    assert len({q.text for q in questions}) == 1024
    for start in (0, 100, 824):
        two_hop = sum(q.hops == 2 for q in questions[start : start + 200])
        assert two_hop in (127, 128, 129)
    assert set(Counter(q.path for q in questions)) == {*world.ONE_HOP_PATHS, *world.TWO_HOP_PATHS}


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_share_of_two_hop_questions_can_be_set(share: float):
    assert {get_world(0).question("train", i, two_hop_share=share).hops for i in range(50)} == {1 + int(share)}


@pytest.mark.parametrize("index", [-1, 1024])
def test_an_index_outside_the_split_names_the_range(index: int):
    with pytest.raises(IndexError, match="0 to 1023"):
        get_world(0).question("test", index)


def test_the_passages_of_the_chain_are_what_the_natural_queries_find():
    searches = found = 0
    for split in world.SPLITS:
        for i in range(300):
            question = get_world(0).question(split, i)
            for relation, subject in zip(question.path, question.chain[:-1], strict=True):
                (hits,) = world_index(0).search([f"{relation} of {subject}"], 1)
                searches += 1
                found += hits[0].passage.title == subject
    assert found == searches


def test_one_search_never_shows_the_answer_of_a_two_hop_question():
    shown = 0
    for i in range(200):
        question = get_world(0).question("test", i, two_hop_share=1.0)
        (hits,) = world_index(0).search([f"{question.path[0]} of {question.chain[0]}"], 3)
        shown += any(question.answer in hit.passage.text for hit in hits)
    assert shown <= 4  # chance: the answer also occurs as somebody else's fact


def test_name_lists_share_no_word():
    lowered = [word.lower() for word in names.WORLD_WORDS]
    assert len(set(lowered)) == len(lowered)
