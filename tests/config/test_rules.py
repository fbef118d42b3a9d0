import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config import Config, load_config, validate
from agentrl.config.derive import derive
from agentrl.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "size", "steps"),
    [
        ((), 256, 1),
        (("--num-steps-per-rollout", "4"), 64, 4),
        (("--global-batch-size", "32"), 32, 8),
        (("--global-batch-size", "128", "--num-steps-per-rollout", "2"), 128, 2),
    ],
)
def test_what_is_left_out_of_the_batch_rule_follows(load, flags, size, steps):
    cfg = load(*flags)
    assert (cfg.global_batch_size, cfg.num_steps_per_rollout) == (size, steps)


def test_batch_rule_is_exact_and_shows_its_numbers(refused):
    message = refused("--rollout-batch-size", "30", "--global-batch-size", "7", "--num-steps-per-rollout", "3")
    assert "rollout_batch_size × n_samples_per_prompt = global_batch_size × num_steps_per_rollout" in message
    assert "30 × 8 = 240 against 7 × 3" in message
    assert "7" in refused("--rollout-batch-size", "30", "--global-batch-size", "7")
    assert "divisor of 256" in refused("--num-steps-per-rollout", "3")


@given(st.integers(1, 64), st.integers(2, 32), st.none() | st.integers(1, 64), st.none() | st.integers(1, 64))
def test_a_derived_batch_always_satisfies_the_rule(batch, samples, size, steps):
    cfg = Config(
        rollout_batch_size=batch, n_samples_per_prompt=samples, global_batch_size=size, num_steps_per_rollout=steps
    )
    try:
        done = derive(cfg)
    except ConfigError:
        assert (batch * samples) % (size or steps) != 0
        return
    holds = done.global_batch_size * done.num_steps_per_rollout == batch * samples
    assert holds or (size is not None and steps is not None)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--rollout-top-p", "0.9"), ("--rollout-top-p 0.9", "before truncation", "Leave it at 1")),
        (("--rollout-batch-size", "0"), ("--rollout-batch-size", "at least 1", "0")),
        (("--rollout-temperature", "0"), ("--rollout-temperature", "more than 0")),
        (("--adam-beta2", "1"), ("--adam-beta2", "to below 1")),
        (("--rollout-max-response-len", "8192"), ("--rollout-max-response-len 8192", "--rollout-max-context-len 8192")),
        (("--rollout-max-context-len", "20000"), ("20000", "max_position_embeddings 16384")),
        (("--tensor-model-parallel-size", "3"), ("--tensor-model-parallel-size 3", "num_attention_heads 4")),
        (("--tensor-model-parallel-size", "4"), ("num_key_value_heads 2",)),
        (("--pipeline-model-parallel-size", "3"), ("--pipeline-model-parallel-size 3", "num_hidden_layers 4")),
        (
            ("--tensor-model-parallel-size", "2", "--actor-num-gpus-per-node", "3"),
            ("1 × --actor-num-gpus-per-node 3 = 3", "tensor 2"),
        ),
        (("--sequence-parallel",), ("--sequence-parallel", "--tensor-model-parallel-size")),
        (("--context-parallel-size", "2"), ("--context-parallel-size 2", "TransformerEngine", "Leave it at 1")),
        (
            ("--virtual-pipeline-model-parallel-size", "2"),
            ("--virtual-pipeline-model-parallel-size 2", "--pipeline-model-parallel-size of at least 2"),
        ),
        (("--gradient-accumulation-fusion",), ("--gradient-accumulation-fusion", "needs CUDA", "not been tried")),
        (("--expert-model-parallel-size", "2"), ("--expert-model-parallel-size 2", "no experts")),
        (("--actor-num-gpus-per-node", "512"), ("--global-batch-size 256", "512 data-parallel ranks")),
        (("--rollout-num-gpus", "5", "--rollout-num-gpus-per-engine", "2"), ("5", "2", "4 or 6")),
        (
            ("--rollout-num-gpus", "4", "--rollout-num-engines", "3"),
            ("--rollout-num-engines 3", "--rollout-num-gpus is 4"),
        ),
        (("--lr-warmup-steps", "1000"), ("--lr-warmup-steps 1000", "100 optimizer steps")),
        (
            ("--advantage-estimator", "ppo", "--num-critic-only-steps", "60", "--lr-warmup-steps", "50"),
            ("--lr-warmup-steps 50 is more than the policy's 40 optimizer steps",),
        ),
        (
            ("--advantage-estimator", "ppo", "--critic-lr-warmup-steps", "101"),
            ("--critic-lr-warmup-steps 101 is more than the critic's 100 optimizer steps",),
        ),
        (("--eps-clip", "0.3", "--eps-clip-high", "0.2"), ("--eps-clip-high 0.2", "--eps-clip 0.3")),
        (("--kl-loss-coef", "0.1"), ("--kl-loss-coef has no effect without --use-kl-loss",)),
        (("--micro-batch-size", "4"), ("--micro-batch-size has no effect", "--no-use-dynamic-batch-size")),
        (("--max-tokens-per-gpu", "4", "--no-use-dynamic-batch-size"), ("--max-tokens-per-gpu has no effect",)),
        (("--wandb-project", "x"), ("--use-wandb",)),
        (("--custom-rm-path", "a:b"), ("--custom-rm-path has no effect without --prompt-data",)),
        (("--prompt-data", "tasks.jsonl"), ("--env search", "--prompt-data tasks.jsonl", "exclude")),
        (("--data-source-path", "nothing"), ("--data-source-path", "module:name", "'nothing'")),
        (("--custom-generate-function-path", "no/where.py:f"), ("no such file: no/where.py",)),
        (("--load", "no/run"), ("--load", "no/run")),
        (("--use-kl-loss", "--ref-load", "no/model"), ("--ref-load", "no/model")),
        (("--use-unbiased-kl",), ("--use-unbiased-kl has no effect without --use-kl-loss",)),
        (("--tis-clip", "3"), ("--tis-clip has no effect without --use-tis",)),
        (("--rs-level", "token"), ("--rs-level has no effect without --use-rs",)),
        (("--overlong-max-len", "9"), ("no effect without --overlong-handling penalty",)),
        (("--loss-scale-factor", "9"), ("no effect without --loss-agg-mode seq-mean-token-sum-norm",)),
        (("--gamma", "0.9"), ("--gamma has no effect without --credit-level turn",)),
        (
            ("--logprob-abs-diff-warn", "0.2", "--logprob-abs-diff-stop", "0.1"),
            ("--logprob-abs-diff-warn 0.2", "--logprob-abs-diff-stop 0.1"),
        ),
        (("--num-layers", "5"), ("--num-layers 5", "num_hidden_layers 4")),
        (("--sglang-enable-deterministic-inference",), ("use --deterministic",)),
        (("--deterministic-mode",), ("use --deterministic",)),
    ],
)
def test_refused_with_the_numbers(refused, flags, parts):
    message = refused(*flags)
    assert all(part in message for part in parts), message


def test_all_problems_are_reported_together(refused):
    message = refused("--rollout-top-p", "0.5", "--sequence-parallel", "--lr-warmup-steps", "9999")
    assert len(message.splitlines()) == 3


def test_missing_environment_and_model(model):
    with pytest.raises(ConfigError, match="--env NAME"):
        validate(derive(Config(hf_checkpoint=model)))
    with pytest.raises(ConfigError, match="no such folder: Org/Model.*hf download"):
        validate(derive(Config(env="search", hf_checkpoint="Org/Model")))


@pytest.fixture(params=["a folder with its newest", "one iteration"])
def of_megatron(tmp_path, request):
    folder = tmp_path / "policy_torch_dist"
    (folder / "iter_0000042").mkdir(parents=True)
    (folder / "iter_0000042" / ".metadata").touch()
    if request.param == "one iteration":
        return str(folder / "iter_0000042")
    (folder / "latest_checkpointed_iteration.txt").write_text("42")
    return str(folder)


def test_where_a_checkpoint_of_megatrons_is_given_the_command_that_converts_it_is_said(model, of_megatron):
    def command(like):
        return f"agentrl convert --load {of_megatron} --hf-checkpoint {like} --output-dir {of_megatron}-hf"

    for flags, like in (
        (["--hf-checkpoint", of_megatron], "MODEL"),
        (["--hf-checkpoint", model, "--use-kl-loss", "--ref-load", of_megatron], model),
        (["--hf-checkpoint", model, "--load", of_megatron], model),
        (["--hf-checkpoint", model, "--load", of_megatron, "--save", of_megatron], model),
    ):
        with pytest.raises(ConfigError, match=re.escape(command(like))):
            load_config(["--env", "search", *flags])


def test_prompt_data_makes_an_environment(tmp_path, model):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "1+1", "label": "2"}\n')
    cfg = load_config(
        ["--prompt-data", str(tasks), "--hf-checkpoint", model, "--rm-type", "math", "--label-key", "label"]
    )
    spec, kwargs = cfg.env_spec()
    assert spec == "agentrl.envs.builtin.prompt:PromptEnv"
    assert kwargs == {
        "path": str(tasks),
        "input_key": "prompt",
        "label_key": "label",
        "metadata_key": None,
        "apply_chat_template": True,
        "reward": "math",
    }


def test_layout_follows_from_parallel_sizes(load):
    cfg = load("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
    assert (cfg.actor_num_gpus_per_node, cfg.world_size, cfg.data_parallel_size) == (4, 4, 1)
    assert load("--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "2").data_parallel_size == 2


def test_engines_follow_from_gpus(load):
    cfg = load("--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "2")
    assert cfg.rollout_num_engines == 4
    assert load().rollout_num_engines == 1
    assert load("--rollout-num-engines", "2").rollout_num_gpus == 2


def test_clip_and_reference_follow(load, model):
    assert load().eps_clip_high == 0.2
    cispo = load("--advantage-estimator", "cispo", "--eps-clip", "1", "--eps-clip-high", "0.28")
    assert cispo.eps_clip_high == 0.28, "no lower bound"
    assert load("--use-kl-loss").ref_load == model
    assert load().ref_load is None


def test_hand_built_values_are_checked_for_type(model):
    wrong = derive(Config(env="search", hf_checkpoint=model)).replace(lr="1e-6", dtype="fp8", tensorboard=1)
    with pytest.raises(ConfigError) as caught:
        validate(wrong)
    assert len(str(caught.value).splitlines()) == 3


def test_what_a_config_json_asks_for_in_vain_is_refused_before_anything_starts(refused, model):
    file = f"{model}/config.json"
    with open(file) as f:
        config = json.load(f)
    with open(file, "w") as f:
        json.dump({**config, "model_type": "llama", "mlp_bias": True, "hidden_act": "gelu"}, f)
    message = refused()
    assert len(message.splitlines()) == 2
    assert f"--hf-checkpoint {model}: in config.json, hidden_act 'gelu' is not computed" in message


def test_tensor_parallelism_of_a_mixture_asks_for_sequence_parallelism(refused, load, model):
    file = f"{model}/config.json"
    with open(file) as f:
        config = json.load(f)
    with open(file, "w") as f:
        json.dump({**config, "model_type": "qwen3_moe", "num_experts": 8}, f)
    ranks = ["--actor-num-gpus-per-node", "2"]
    assert "--sequence-parallel. Add it" in refused(*ranks, "--tensor-model-parallel-size", "2")
    load(*ranks, "--tensor-model-parallel-size", "2", "--sequence-parallel")
    load(*ranks, "--expert-model-parallel-size", "2")
