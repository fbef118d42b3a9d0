"""`agentrl migrate`: what becomes of a launch script of slime."""

import shlex
import subprocess

import pytest

from agentrl.cli.main import main
from agentrl.config import load_config

SCRIPT = r"""#!/bin/bash
pkill -9 sglang
COUNT=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9]*' | wc -l)
if [ "$COUNT" -gt 0 ]; then
    HAS_NVLINK=1
fi
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/tiny.sh"
source "${SCRIPT_DIR}/models/absent.sh"
CKPT_ARGS=(
   --hf-checkpoint MODEL
   #--hf-checkpoint /models/other
   --ref-load /models/tiny_torch_dist
   --load /models/saved/
   --save /models/saved/
)
ROLLOUT_ARGS=(
   --prompt-data DATA
   --rollout-shuffle
   --custom-rm-path pkg.scores.right
   --rollout-max-response-len 64
   --rollout-temperature 0.8

   --balance-data # said here
)
EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data held "DATA"
   --eval-max-response-len 128
)
WANDB_ARGS=(
   # --use-wandb
   --wandb-key ${WANDB_KEY}
)
MORE=(--lr $LR)
MORE+=(--nonsense a b)
JSON="{
  \"env_vars\": {\"NVLS\": \"${HAS_NVLINK}\"}
}"
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${JSON}" \
   -- python3 train.py \
   --actor-num-nodes 1 --colocate --kl-coef=0.00 \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} \
   ${ROLLOUT_ARGS[@]} ${WANDB_ARGS[@]} "${EVAL_ARGS[@]}" \
   ${MORE[@]} 2>&1 | tee log.txt
echo --after
"""


@pytest.fixture
def migrate(tmp_path, capsys):
    """Run the command on a script; ``(words of the printed command, remark by flag)``.

    Without the last word, which every script gets: slime computes old log-probabilities anew.
    """

    def run(text):
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "tiny.sh").write_text("MODEL_ARGS=(\n --swiglu --num-layers 4 --rotary-base 10000\n)\n")
        file = tmp_path / "run.sh"
        file.write_text(text)
        assert main(["migrate", str(file)]) == 0
        lines = capsys.readouterr().out.splitlines()
        remarks = {line.split()[1]: line for line in lines[1:] if line.startswith("#")}
        command = [line for line in lines if not line.startswith("#")]
        words = shlex.split(" ".join(line.rstrip("\\") for line in command))
        assert words.pop() == "--no-use-rollout-logprobs" and "anew" in remarks["--no-use-rollout-logprobs"]
        return words, remarks

    return run


def flags_of(words):
    table, name = {}, None
    for word in words[2:]:
        if word.startswith("--"):
            name = word
        table.setdefault(name, []).extend([] if word == name else [word])
    return table


def test_each_flag_is_kept_changed_or_left_out_with_a_reason(migrate):
    words, remarks = migrate(SCRIPT)
    flags = flags_of(words)
    assert words[:2] == ["agentrl", "train"]
    assert flags["--custom-rm-path"] == ["pkg.scores:right"]
    assert flags["--eval-prompt-data"] == ["held", "DATA"]
    assert flags["--lr"] == ["$LR"]
    assert flags["--rollout-max-context-len"] == ["4160"] and flags["--eval-max-context-len"] == ["4224"]
    assert flags["--eval-temperature"] == ["0.8"]
    left_out = {"--swiglu", "--num-layers", "--rotary-base", "--ref-load", "--balance-data"}
    left_out |= {"--rollout-shuffle", "--wandb-key", "--nonsense"}
    assert not left_out & set(flags)
    for flag in left_out:
        assert "left out" in remarks[flag], flag
    assert "WANDB_API_KEY" in remarks["--wandb-key"] and "--colocate" in flags
    assert set(flags) <= {line.split()[0] for line in remarks}
    assert "--after" not in remarks and "--use-wandb" not in remarks and "--address" not in remarks


def test_the_printed_command_is_taken(migrate, tmp_path):
    from agentrl.config.presets import demo_folder

    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "label": "b"}\n')
    (tmp_path / "scores.py").write_text("def right(text, answer):\n    return 1.0\n")
    text = SCRIPT.replace("MODEL\n", f"{demo_folder()}\n").replace("DATA", str(data)).replace("$LR", "1e-6")
    text = text.replace("/models/saved/", str(tmp_path / "saved")).replace("--load", "--save-interval 3 #")
    text = text.replace("--rollout-max-response-len 64", "--rollout-max-response-len 64 --rollout-max-context-len 512")
    text = text.replace("--eval-max-response-len 128", "--eval-max-response-len 128 --eval-max-context-len 600")
    words, _ = migrate(text)
    config = load_config(words[2:])
    assert (config.lr, config.eval_temperature, config.save_interval) == (1e-6, 0.8, 3)


def test_the_output_is_a_shell_script(migrate, tmp_path, capsys):
    migrate(SCRIPT)
    main(["migrate", str(tmp_path / "run.sh")])
    script = capsys.readouterr().out.replace("agentrl train", "printf '%s\\n'")
    said = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, timeout=20, env={"LR": "2 3"}, check=True
    )
    assert "2 3" in said.stdout.splitlines()


def test_asynchronous_training_is_kept(migrate):
    words, remarks = migrate("python train_async.py --lr 1e-6")
    assert sorted(words) == ["--async-buffer-size", "--lr", "1", "1e-6", "agentrl", "train"]
    assert "one rollout ahead" in remarks["--async-buffer-size"]


def test_a_command_in_a_value_ends_neither_the_array_nor_the_call(migrate, tmp_path, capsys):
    words, _ = migrate(
        "ARGS=(\n --lr-warmup-steps $(nproc) # $(\n --seed $((2 * (1 + 2)))\n --lr 1e-6\n)\n"
        'python train.py ${ARGS[@]} --wandb-project "a b$(basename "$PWD" .x)c" --num-rollout `echo 3` --max-turns 4\n'
    )
    main(["migrate", str(tmp_path / "run.sh")])
    script = capsys.readouterr().out.replace("agentrl train", "printf '%s\\n'")
    run = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=20, check=True, cwd=tmp_path)
    said = run.stdout.splitlines()
    assert said[0] == "--lr-warmup-steps" and said[1].isdecimal()
    assert said[2:6] == ["--seed", "6", "--lr", "1e-6"]
    assert said[6:-1] == ["--wandb-project", f"a b{tmp_path.name}c", "--num-rollout", "3", "--max-turns", "4"]


def test_what_training_would_refuse_of_megatrons_options_is_left_out(migrate):
    flags = "--num-experts 128 --moe-router-topk 8 --optimizer-cpu-offload --hidden-dropout 0.1"
    taken = "--optimizer adam --attention-dropout 0.0"
    words, remarks = migrate(f"python train.py {flags} {taken} --norm-epsilon 1e-6")
    assert words == ["agentrl", "train", *taken.split()]
    for flag in ("--num-experts", "--moe-router-topk"):
        assert "left out" in remarks[flag] and "what the checkpoint" in remarks[flag]
    assert "needless" in remarks["--norm-epsilon"]


@pytest.mark.parametrize(
    "end", ["> log.txt", ">log.txt", "2> log.txt", ">> log.txt --seed 3", "&> log.txt", "2>&1 | tee log.txt"]
)
def test_where_the_output_goes_is_no_value(migrate, end):
    words, _ = migrate(f"python train.py --lr 1e-6 {end}")
    assert words[:4] == ["agentrl", "train", "--lr", "1e-6"] and words[4:] in ([], ["--seed", "3"])


def test_an_array_that_is_set_nowhere_is_named(migrate, capsys, tmp_path):
    migrate("source models/absent.sh\npython train.py ${ABSENT[@]} --train-env-vars '{\n}' --lr 1")
    main(["migrate", str(tmp_path / "run.sh")])
    out = capsys.readouterr().out
    assert "#   ${ABSENT[@]}" in out and "set nowhere" in out
    assert all(line.startswith(("#", "agentrl", "    --")) for line in out.splitlines())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo hello\n", "calls no train.py"),
        ("python train.py --x 'open\n", "not a shell script"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_launch_script_is_refused(tmp_path, capsys, text, said):
    file = tmp_path / "run.sh"
    if text is not None:
        file.write_text(text)
    assert main(["migrate", str(file)]) == 2
    assert said in capsys.readouterr().err


def test_a_script_that_sources_itself_ends(tmp_path, capsys):
    file = tmp_path / "run.sh"
    file.write_text('source "${SCRIPT_DIR}/run.sh"\npython train.py --lr 1e-6\n')
    assert main(["migrate", str(file)]) == 0
    assert "--lr 1e-6" in capsys.readouterr().out
