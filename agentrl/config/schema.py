"""Every option of a run: one flat, frozen dataclass per command, put together from sections.

A section is a small dataclass; its docstring is its heading in help, the string under each field is that option's help.
A reader is handed its section and not the whole: ``config.section(OptimizerOptions)``. Flags (``rollout_batch_size`` is
``--rollout-batch-size``), file keys, ``--help`` and ``docs/configuration.md`` are generated from here. A field that is
``None`` until :func:`agentrl.config.load_config` has run and a number afterwards says so in its help.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from agentrl.config.options import Count, NonNegative, PathText, Positive, Probability, Range, Seconds
from agentrl.config.presets import LENGTHS

Beta = Annotated[float, Range(low=0.0, high=1.0, high_open=True)]
if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


@dataclass(frozen=True)
class Section:
    """Options as a frozen dataclass."""

    def replace(self, **changes: Any) -> Self:
        """A copy with ``changes``; nothing is validated or derived again."""
        return dataclasses.replace(self, **changes)

    def section(self, kind: type[T]) -> T:
        """The options of one section alone, such as ``OptimizerOptions``: what their reader is handed."""
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})


class OptionSet(Section):
    """What the configurations of both commands can do."""

    if TYPE_CHECKING:
        rollout_max_response_len: int
        rollout_max_context_len: int
        eval_max_response_len: int | None
        eval_max_context_len: int | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready copy of all options; the embedded model is written as ``"demo"``."""
        from agentrl.config.serialize import to_dict

        return to_dict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`. Raises ConfigError on an unknown key or a value of the wrong type."""
        from agentrl.config.serialize import from_dict

        return from_dict(cls, values)

    @property
    def held_out(self) -> Self:
        """A copy whose limits and stop strings of episodes are those of evaluation."""
        return self.replace(
            rollout_max_response_len=self.eval_max_response_len or self.rollout_max_response_len,
            rollout_max_context_len=self.eval_max_context_len or self.rollout_max_context_len,
        )

    @property
    def longest_context(self) -> int:
        """Most tokens of an episode, of training or evaluation."""
        return max(self.rollout_max_context_len, self.eval_max_context_len or 0)


@dataclass(frozen=True, kw_only=True)
class EnvironmentOptions:
    """Environment and data"""

    env: str = ""
    """The environment: a registered name (`search`), `module:Class` or `path/to/file.py:Class`."""
    env_args: dict[str, Any] = field(default_factory=dict)
    """Keyword argument of the environment as `KEY=VALUE`; the value is read as JSON where it is JSON. Repeatable."""
    prompt_data: PathText | None = None
    """Single-turn tasks used in place of an environment: a JSONL or Parquet file, a folder or glob of such files, a
    Hugging Face dataset on disk, or `module:function` or `file.py:function` that yields rows."""
    input_key: str = "prompt"
    """Field of a task line that holds the prompt: a string, or a list of chat messages."""
    label_key: str | None = "label"
    """Field of a task line that holds the expected answer."""
    metadata_key: str | None = None
    """Field of a task line that is handed to the reward function as it is."""
    apply_chat_template: bool = True
    """Put string prompts into the model's chat template as one user message; otherwise they are sent as they are."""
    rm_type: Literal["exact_match", "f1", "math", "deepscaler", "dapo", "gpqa", "remote_rm"] = "exact_match"
    """Reward of prompt data, from the library (docs/rewards.md); `remote_rm` asks the server at --rm-url."""
    rm_url: str | None = None
    """Address of a reward server, with --rm-type remote_rm: `{"prompt", "response", "label"}` is posted to it, and a
    number or an object of named numbers comes back."""
    custom_rm_path: str | None = None
    """Reward function or class of your own for prompt data, `module:name` or `file.py:name`; replaces --rm-type."""
    streaming_data: bool = False
    """Leave prompt data on disk and read each task when it is needed, for data that does not fit into memory. An index
    is made once and kept in the user's cache folder."""
    num_data_workers: Positive = 1
    """Processes that make this index."""
    sandbox: Literal["auto", "bubblewrap", "container", "process"] | None = None
    """How tools run code that the model wrote. Unset: as the environment says, which is `auto` unless it says
    otherwise: bubblewrap, else a container where the tool names an image, else an error that explains. `process` is no
    security boundary and is taken only when it is named."""
    custom_generate_function_path: str | None = None
    """Episode loop of your own, `module:function` or `file.py:function`: `async def generate(ctx)`."""

    def env_spec(self) -> tuple[str, dict[str, Any]]:
        """``(spec, kwargs)`` for :func:`agentrl.make`: the environment, or prompt data as one."""
        if self.prompt_data is None:
            return self.env, self.arguments_of(None)
        spec, kwargs = self.prompt_env_spec(self.prompt_data)
        return spec, {**kwargs, **self.arguments_of(None)}

    def arguments_of(self, name: str | None) -> dict[str, Any]:
        """What ``--env-arg NAME.KEY=VALUE`` gave the environment ``name``; None: what was given without a name."""
        if name is None:
            return {key: value for key, value in self.env_args.items() if "." not in key}
        start = name + "."
        return {key.removeprefix(start): value for key, value in self.env_args.items() if key.startswith(start)}

    def prompt_env_spec(self, path: str) -> tuple[str, dict[str, Any]]:
        """``(spec, kwargs)`` of the environment over a prompt file (--prompt-data, --eval-prompt-data)."""
        kwargs: dict[str, Any] = {
            "path": path,
            "input_key": self.input_key,
            "label_key": self.label_key,
            "metadata_key": self.metadata_key,
            "apply_chat_template": self.apply_chat_template,
            "reward": self.custom_rm_path or self.rm_type,
        }
        if self.rm_url is not None:
            kwargs["rm_url"] = self.rm_url
        if self.streaming_data:
            kwargs |= {"streaming": True, "workers": self.num_data_workers}
        return "agentrl.envs.builtin.prompt:PromptEnv", kwargs


@dataclass(frozen=True, kw_only=True)
class SupervisedOptions:
    """Supervised fine-tuning, with `--loss-type sft_loss`"""

    train_data: PathText | None = None
    """Conversations to learn: a JSONL, Parquet or Arrow file, a folder or glob of such files. A row has `messages` in
    the OpenAI form and, if there are any, `tools`."""
    sft_from: PathText | None = None
    """Training run whose stored trajectories are learned, in place of --train-data: those of episodes that succeeded,
    or earned --sft-min-reward."""
    sft_min_reward: float | None = None
    """Least reward of an episode that is learned; unset: those that solved their task."""
    eval_data: PathText | None = None
    """Held-out conversations, files like --train-data: their loss is measured every --eval-interval rollouts."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling in training"""

    rollout_temperature: Annotated[float, Range(low=0.0, low_open=True)] = 1.0
    """Sampling temperature in training; log-probabilities are of the softmax at this temperature."""
    rollout_top_p: Annotated[float, Range(low=0.0, high=1.0, low_open=True)] = 1.0
    """Nucleus sampling. Training takes 1 only: log-probabilities are those before truncation."""
    rollout_stop: tuple[str, ...] = ()
    """Text that ends a model turn in training, beside what the environment and the call format say. Several texts, or
    repeatable."""


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Limits of an episode"""

    rollout_max_response_len: Positive = LENGTHS["rollout_max_response_len"]
    """Most tokens of one model turn. Less by default where the model has fewer positions."""
    rollout_max_context_len: Positive = LENGTHS["rollout_max_context_len"]
    """Most tokens of an episode: prompt, model turns and tool output together. By default at most the model's
    positions (`max_position_embeddings`)."""
    max_turns: Positive = 8
    """Most model turns of an episode; the smaller of this and the environment's own limit counts."""
    max_tool_output_tokens: Positive | None = None
    """Most tokens of observations over the whole episode; one more ends it, with the stop reason `max_tool_output`.
    Unset: only --rollout-max-context-len counts. A single result is cut by the environment's own `max_tool_output`."""
    episode_timeout: Seconds = 600.0
    """Wall time of one episode in seconds."""
    episode_step_timeout: Seconds = 300.0
    """Wall time of one reset or step of the environment in seconds, tools and rewards included; more is an
    infrastructure error. At most --episode-timeout."""
    tool_timeout: Seconds | None = None
    """Wall time of one tool call in seconds; unset: the environment's own (30 unless it says otherwise)."""
    rollout_concurrency: Positive = 64
    """Episodes in flight at once, over all engines."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model"""

    hf_checkpoint: PathText | None = None
    """Folder of the model in Hugging Face form. Without it: the embedded demo model, and in training and evaluation its
    preset of starting values."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of engines and trainer; `auto` is fp32 on the CPU and bf16 on GPUs."""
    threads: Positive | None = None
    """CPU threads of each engine and trainer process; unset: the cores divided among them."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Engines"""

    rollout_num_engines: Positive | None = None
    """Number of SGLang engines. Follows from --rollout-num-gpus / --rollout-num-gpus-per-engine; 1 when neither is
    given."""
    rollout_num_gpus: Positive | None = None
    """GPUs for the engines, all together; on a machine without GPUs, engines of one process each."""
    rollout_num_gpus_per_engine: Positive = 1
    """GPUs of one engine (its tensor-parallel size)."""
    engine_timeout: Seconds = 600.0
    """Longest wait in seconds for an engine: to start, and to answer one request with all its retries."""
    rollout_health_check_interval: NonNegative = 15.0
    """Seconds between two checks that each engine can generate; 0 for none. An engine whose process ends is noticed
    at once, and one that does not answer two checks is replaced."""
    rollout_health_check_timeout: Seconds = 45.0
    """Seconds such a check may take. A trainer rank or rollout manager that stands still for twice as long ends the
    run."""
    rollout_min_engines: Positive = 1
    """Engines with which a run goes on. A place is given up where three in a row do not start, or fail within a minute;
    the run ends when fewer are left."""
    router_policy: Literal["consistent_hashing", "cache_aware", "round_robin", "random"] = "consistent_hashing"
    """How the router chooses an engine; `consistent_hashing` keeps an episode on one engine."""


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """Chat template"""

    apply_chat_template_kwargs: str = ""
    """Variables of the chat template, a JSON object: `'{"enable_thinking": false}'`. A task may set its own over them
    (`info["template_kwargs"]`); a server of --base-url gets them as `chat_template_kwargs`."""
    chat_template: PathText | None = None
    """File with a chat template (jinja) to use in place of the model's own."""


@dataclass(frozen=True, kw_only=True)
class DatedTemplateOptions(TemplateOptions):
    """Chat template"""

    chat_template_date: str | None = None
    """The date, `YYYY-MM-DD`, that a template which writes the date of the day (Llama 3) takes for today. Unset: the
    day on which the run starts, also when it goes on later."""


@dataclass(frozen=True, kw_only=True)
class SeedOptions:
    """Reproducibility"""

    seed: Count = 0
    """Seed of task order, sampling and initialization."""
    deterministic: bool = False
    """With the same seed on the same machine, give the same tokens and weights, bit for bit: in two runs, and in one
    that was interrupted. Slower; what it covers is under "Reproducibility" in docs/training.md."""


@dataclass(frozen=True, kw_only=True)
class DebugOptions:
    """Debugging: one half of a run alone"""

    debug_rollout_only: bool = False
    """Play rollouts, store and log them, and train nothing: no trainer starts, and engines keep the weights of
    --hf-checkpoint. What is said of the trainer has no effect (docs/training.md)."""
    debug_train_only: bool = False
    """Train on stored rollouts and play nothing: no engine and no environment starts. Needs --load-debug-rollout-data,
    which implies it."""
    load_debug_rollout_data: PathText | None = None
    """Run folder whose stored rollouts are trained on, each at its own step; or its folder `trajectories` alone. The
    run's configuration is taken over; flags given here replace it."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Run folder and logging"""

    output_dir: PathText | None = None
    """Run folder; default `runs/<env>-<date>-<n>`. Holds config, metrics, trajectories, checkpoints, logs."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much the processes of the run write into their logs."""


@dataclass(frozen=True, kw_only=True)
class FaultOptions:
    """Faults"""

    auto_resume: bool = False
    """Go on from the newest checkpoint when the run ends by a fault that another start may cure: exit code 5, a driver
    that was killed. Not by an error of configuration or code, a full disk, Ctrl-C or SIGTERM."""
    auto_resume_max: Positive = 5
    """Restarts in a row that bring no new checkpoint; then the fault stands. Between them the run waits: 1 second, 5,
    10, 20 and so on, at most 300."""
    train_stall_timeout: Seconds = 600.0
    """Longest time in seconds in which a trainer rank may finish no micro-batch, nor any other part of a step: a
    collective that never ends, say. Then the run ends, with the rank's stack in its log."""


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """Before the start"""

    dry_run: bool = False
    """Make every check that a start makes, print placement, batch arithmetic, memory and paths, and start nothing."""


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Training loop and batch"""

    num_rollout: Positive = 100
    """Rollouts (generate, train, sync) of the run."""
    rollout_batch_size: Positive = 32
    """Tasks of one rollout."""
    n_samples_per_prompt: Positive = 8
    """Episodes per task: the group whose mean is the baseline."""
    dynamic_sampling_filter_path: str | None = None
    """Which groups are trained on; others are played in place of those left out: `reward_variance` (rewards of the
    group differ), `success_band=LOW,HIGH` (its share of successes is in the band), or a function of your own,
    `module:function` or `file.py:function`, that takes a group and says whether to keep it."""
    over_sampling_batch_size: Positive | None = None
    """Tasks that are handed out at once for a rollout with --dynamic-sampling-filter-path, or are in play with
    --partial-rollout; unset: as many as it has. What is left over when the rollout is full is played again later, or,
    with --partial-rollout, goes on."""
    partial_rollout: bool = False
    """End a rollout as soon as enough of --over-sampling-batch-size tasks have finished. Episodes of the others go on,
    in their environments, and later rollouts take them first (docs/asynchronous.md)."""
    mask_offpolicy_in_partial_rollout: bool = False
    """With --partial-rollout leave tokens out of the loss that are older than --async-buffer-size and
    --update-weights-interval make them: those sampled before the weights of their rollout."""
    global_batch_size: Positive | None = None
    """Episodes of one optimizer step. The rule is exact: rollout_batch_size × n_samples_per_prompt =
    global_batch_size × num_steps_per_rollout; unset, it follows from it."""
    num_steps_per_rollout: Positive | None = None
    """Optimizer steps per rollout; unset, it follows from the rule (1 when --global-batch-size is unset too)."""
    micro_batch_size: Positive = 1
    """Episodes of one micro-batch when --no-use-dynamic-batch-size."""
    use_dynamic_batch_size: bool = True
    """Fill micro-batches up to --max-tokens-per-gpu tokens, without padding."""
    max_tokens_per_gpu: Positive = 8192
    """Tokens of one packed micro-batch on one rank; a longer episode is a micro-batch of its own."""
    rollout_num_workers: Count | None = None
    """Processes that play episodes, each its share of --rollout-concurrency; 0: the rollout manager plays them itself,
    which is one process less and easier to debug. One plays about a thousand turns a second. Unset: one for each 256 of
    --rollout-concurrency, at most one for each 4 cores, and 0 where that makes fewer than two."""
    curriculum_path: str | None = None
    """Which of the next tasks are handed out, one in four, from how often each was solved: `frontier` (about half of
    the time), or a function of your own, `module:function` or `file.py:function`:
    `curriculum(args, tasks, success, num_samples)` returns some of `tasks`."""
    data_source_path: str | None = None
    """Task source of your own, `module:Class` or `file.py:Class`, with `get_samples(num_samples)` and
    `add_samples(samples)`."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.num_rollout * (self.num_steps_per_rollout or 1)


@dataclass(frozen=True, kw_only=True)
class AsyncOptions:
    """Asynchronous training"""

    async_buffer_size: Count = 0
    """Rollouts that may be played, or be in play, ahead of the one that is trained on. 0 takes turns: each rollout is
    played by the newest weights, while the trainer waits (docs/asynchronous.md)."""
    update_weights_interval: Positive = 1
    """Rollouts trained on between two updates of the engines' weights. They are also updated before an evaluation."""
    max_staleness: Count | None = None
    """How many versions older than the trainer's the weights may be that sampled a token which is trained on; checked
    when a batch is made, and older groups are played again; with --partial-rollout a rollout waits for groups that
    would become too old. Unset: as old as --async-buffer-size and --update-weights-interval let them become, which is
    their sum less one, and with --partial-rollout as old as they are."""

    @property
    def oldest_version(self) -> int:
        """How many versions old a token can be that an undisturbed run trains on, without --partial-rollout."""
        return self.async_buffer_size + self.update_weights_interval - 1


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Replay of old trajectories"""

    replay_share: Annotated[float, Range(low=0.0, high=1.0, high_open=True)] = 0.0
    """Share of a batch's groups that were trained on in an earlier rollout: so many tasks fewer are played
    (docs/asynchronous.md)."""
    replay_buffer_size: Positive = 4
    """Last rollouts of which they are taken. Their trajectories are kept in memory."""
    buffer_filter_path: str = "newest"
    """Which of them are taken: `newest`, `best` (by mean reward), `prioritized` (by the size of their advantages),
    `stratified` (of all levels of success alike), or a function of your own, `module:function` or `file.py:function`:
    `buffer_filter(args, buffer, num_samples)` returns groups of `buffer`."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Held-out evaluation"""

    eval_tasks: Positive = 200
    """Held-out tasks of one evaluation, of each environment and file; fixed over the run. All of them where there are
    fewer."""
    n_samples_per_eval_prompt: Positive = 1
    """Episodes per held-out task."""
    eval_temperature: NonNegative = 0.0
    """Sampling temperature in evaluation; 0 is greedy."""
    eval_top_p: Annotated[float, Range(low=0.0, high=1.0, low_open=True)] = 1.0
    """Nucleus sampling in evaluation: the smallest set of tokens with this much probability."""
    eval_top_k: Annotated[int, Range(low=-1)] = -1
    """Most likely tokens to sample from in evaluation; -1 for all."""
    eval_max_response_len: Positive | None = None
    """Most tokens of one model turn in evaluation; unset: --rollout-max-response-len."""
    eval_max_context_len: Positive | None = None
    """Most tokens of an episode in evaluation; unset: --rollout-max-context-len."""
    eval_stop: tuple[str, ...] = ()
    """Text that ends a model turn in evaluation, in place of --rollout-stop. Several texts, or repeatable."""
    eval_prompt_data: tuple[tuple[str, PathText], ...] = ()
    """A named held-out task file, evaluated beside the environment's own: NAME PATH. Several pairs, or repeatable.
    Arguments for one alone are `--env-arg NAME.KEY=VALUE`."""
    eval_env: tuple[str, ...] = ()
    """A further environment whose held-out split is evaluated, under its name. Repeatable, or several with commas
    between; its arguments are `--env-arg NAME.KEY=VALUE`."""
    eval_own_split: bool = True
    """Evaluate on the held-out split of the environment (of training: the one trained on) too."""


@dataclass(frozen=True, kw_only=True)
class TrainingEvaluationOptions:
    """Held-out evaluation in training"""

    eval_interval: Count = 0
    """Rollouts between held-out evaluations (also one before the first and one after the last); 0 for none."""
    eval_before_train: bool = True
    """Evaluate before the first rollout too."""
    best_metric: str | None = None
    """Metric of an evaluation by which the best checkpoint is kept beside the newest ones, such as
    `eval/search/success`; the larger the better. A checkpoint is then written at each evaluation. Unset: none is kept
    for that."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """A server in place of engines"""

    base_url: str | None = None
    """Address of an OpenAI-compatible server (`http://127.0.0.1:8000/v1`): it is the policy, and no engine is
    started."""
    model: str | None = None
    """Name of the model on that server; unset: the only one that it lists."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the server's key; without it, none is sent."""


@dataclass(frozen=True, kw_only=True)
class RunCheckpoint:
    """Checkpoint of a training run"""

    run: PathText | None = None
    """Training run of which a checkpoint is taken, in place of --hf-checkpoint. An evaluation also takes its
    environment and limits."""
    checkpoint: str = "newest"
    """Checkpoint of --run: `newest`, `best` (see --best-metric of training), or its number of rollouts."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRunOptions(RunCheckpoint):
    """Evaluation run"""

    split: str = "test"
    """Split to evaluate. The training split is taken only when it is asked for by name, and the report says so."""
    task_id: tuple[str, ...] = ()
    """A task to evaluate, in place of --eval-tasks of them: its id (`search/test/17`) or its number in the split
    (`17`). Repeatable."""
    eval_time_limit: Seconds | None = None
    """Wall time in seconds after which no further episode is started; those that run are finished, the rest is left
    to a rerun of the same command."""
    max_retries: Count = 2
    """Further attempts of an episode that ended for reasons of infrastructure. Others are never tried again."""
    fail_on_error: Probability = 0.0
    """Largest share of episodes that may end for reasons of infrastructure, after all attempts, for exit code 0."""
    rescore: bool = False
    """Generate nothing: apply the rewards as they are now to the episodes stored in --output-dir."""
    json: bool = False
    """Print the summary to standard output as one JSON object, and all else to standard error."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Checkpoints"""

    save: PathText | None = None
    """Folder of the checkpoints; default `checkpoints/` in the run folder. It belongs to this run alone."""
    save_interval: Count = 20
    """Rollouts between checkpoints; 0 writes none on the way. The last rollout is saved unless this is 0."""
    keep_last: Count = 2
    """Newest checkpoints kept; 0 keeps all."""
    async_save: bool = True
    """Write checkpoints beside the next rollout: the run waits only until ranks have copied their state to host memory,
    where it stays until it is written. --no-async-save waits for the disk."""
    save_hf: PathText | None = None
    """Folder to which the trained model is exported in Hugging Face form when the run ends."""
    load: PathText | None = None
    """Run folder, its --save folder, or one checkpoint, to go on from. Its configuration is taken over; flags given
    here replace it. With another --output-dir it is forked. A folder that is not there yet and that --save or
    --output-dir names too starts a new run."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmOptions:
    """Algorithm"""

    loss_type: Literal["policy_loss", "sft_loss"] = "policy_loss"
    """The loss: of a policy on episodes that it plays, or, for supervised fine-tuning, the negative log-likelihood of
    --train-data or --sft-from; then no engine is started (docs/sft.md)."""
    advantage_estimator: str = "grpo"
    """How rewards become credit, and the loss that goes with it: `grpo`, `dr_grpo`, `gspo`, `cispo`, `rloo`,
    `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `ppo`, or an algorithm of your own, `module:Class` or
    `file.py:Class` (docs/algorithms.md)."""
    grpo_std_normalization: bool = True
    """Divide by the group's standard deviation, with `grpo`, `gspo` and `cispo`."""
    credit_level: Literal["trajectory", "turn"] = "trajectory"
    """What a return is of: the whole trajectory, or each turn, which is then credited with what was earned from it
    on. With `ppo`, what a step is: each turn, or otherwise each token."""
    gamma: Probability = 1.0
    """Discount of what is earned a turn later, with --credit-level turn; a step later, with `ppo`."""
    lambd: Probability = 1.0
    """Lambda of generalized advantage estimation, with `ppo`: 1 takes returns as they come, 0 trusts the critic."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None = None
    """How the terms of tokens become one loss: every token alike; every trajectory alike, and its tokens alike; or each
    trajectory's sum divided by --loss-scale-factor. Unset: as the algorithm says."""
    loss_scale_factor: Positive | None = None
    """Tokens that `seq-mean-token-sum-norm` divides by. Unset: the most that can be sampled in an episode, the smaller
    of --rollout-max-context-len and --max-turns × --rollout-max-response-len."""
    eps_clip: Annotated[float, Range(low=0.0, high=1.0, low_open=True)] = 0.2
    """Lower clip range of the probability ratio."""
    eps_clip_high: Annotated[float, Range(low=0.0, low_open=True)] | None = None
    """Upper clip range of the probability ratio; unset: the same as --eps-clip."""
    eps_clip_c: Annotated[float, Range(low=1.0, low_open=True)] | None = None
    """Dual clip: where the advantage is negative, a token's loss is at most so many times its size. Unset: no limit."""
    custom_loss_function_path: str | None = None
    """Policy term of your own, `module:function` or `file.py:function`, in place of the algorithm's; the KL loss and
    the entropy bonus stay (docs/algorithms.md)."""
    overlong_handling: Literal["keep", "mask", "penalty"] = "keep"
    """What is done with episodes that grow long: nothing; those that a budget ended are compared but are in no loss;
    or a penalty is taken from the reward of an episode that comes near --overlong-max-len."""
    overlong_max_len: Positive | None = None
    """Sampled tokens of an episode from which on the whole penalty is taken. Unset: the most that can be, the smaller
    of --rollout-max-context-len and --max-turns × --rollout-max-response-len."""
    overlong_buffer_len: Positive | None = None
    """Tokens before that over which the penalty grows from 0. Unset: a fifth of --overlong-max-len."""
    overlong_penalty_factor: Annotated[float, Range(low=0.0, low_open=True)] = 1.0
    """The whole penalty."""
    use_rollout_logprobs: bool = True
    """Take the old log-probabilities of the probability ratio from the engine that sampled; otherwise the trainer
    computes them anew before a rollout's first optimizer step, at the cost of a forward pass if there are several."""
    use_tis: bool = False
    """Weigh each token's policy term by trainer ÷ engine, of probabilities before the step; needs
    --no-use-rollout-logprobs."""
    tis_mode: Literal["truncate", "mask"] = "truncate"
    """What is done with a weight outside --tis-clip-low and --tis-clip: it is set to the bound, or to 0."""
    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """What the weight is of: a token; its trajectory, the product over its tokens; or their geometric mean."""
    tis_clip: Annotated[float, Range(low=0.0, low_open=True)] = 2.0
    """Upper bound of the weight."""
    tis_clip_low: NonNegative = 0.0
    """Lower bound of the weight."""
    use_rs: bool = False
    """Leave out of the policy term the trajectories on which trainer and engine differ too much; needs
    --no-use-rollout-logprobs."""
    rs_level: Literal["token", "sequence", "geometric"] = "geometric"
    """What must be within the bounds: the ratio of every token; the product over the tokens; or their geometric
    mean."""
    rs_lower_bound: NonNegative = 0.5
    """Lower bound of trainer ÷ engine in an accepted trajectory."""
    rs_upper_bound: Annotated[float, Range(low=0.0, low_open=True)] = 2.0
    """Upper bound of trainer ÷ engine in an accepted trajectory."""
    use_opsm: bool = False
    """Leave out of the policy term the tokens with a negative advantage in trajectories from which the policy has moved
    away (off-policy sequence masking); costs a forward pass an optimizer step."""
    opsm_delta: NonNegative = 1e-4
    """How far, in nats a token: the mean of engine less trainer, of log-probabilities before the optimizer step."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence to the reference model in the reward: so much of it is taken from each reward."""
    use_kl_loss: bool = False
    """Add the KL divergence to the reference model to the loss."""
    kl_loss_coef: NonNegative = 0.001
    """Weight of the KL loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] | None = None
    """Estimator of the KL divergence, in the reward and in the loss; `low_var_kl` is k3, clamped. Unset: k1 in the
    reward, low_var_kl in the loss. In the loss k1 needs --use-unbiased-kl: alone its expected gradient is 0."""
    use_unbiased_kl: bool = False
    """Multiply the KL loss of a token by its probability ratio, so that its expected gradient is the divergence's."""
    ref_update_interval: Positive | None = None
    """Rollouts after which the policy of then becomes the reference, again and again. Unset: the reference stays."""
    ref_load: PathText | None = None
    """Folder of the reference model in Hugging Face form; unset: --hf-checkpoint."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    logprob_abs_diff_warn: NonNegative | None = None
    """Warn when the trainer's and the engine's log-probabilities of a rollout differ by more nats in the mean; 0 never
    does. Unset: 0.001 in fp32, 0.03 in bf16."""
    logprob_abs_diff_stop: NonNegative | None = None
    """Stop, before the rollout is trained on, when they differ by more; 0 never does. Unset: 0.01 in fp32, 0.1 in
    bf16."""


@dataclass(frozen=True, kw_only=True)
class CriticOptions:
    """Critic, with `--advantage-estimator ppo`"""

    critic_load: PathText | None = None
    """Folder of the model in Hugging Face form that the critic starts from: one with a `score.weight` (a reward model),
    or any other, whose values start at 0. It must share the policy's tokens. Unset: --hf-checkpoint."""
    critic_lr: Annotated[float, Range(low=0.0, low_open=True)] | None = None
    """Peak learning rate of the critic; unset: --lr. The rest of its optimizer is as the policy's."""
    critic_lr_warmup_steps: Count = 0
    """Optimizer steps of linear warm-up of the critic."""
    value_clip: NonNegative = 0.2
    """Clip range of a value in the critic's loss, around what it was before the update; 0 switches clipping off."""
    num_critic_only_steps: Count = 0
    """First rollouts of the run on which the critic alone is trained."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Optimizer"""

    lr: Annotated[float, Range(low=0.0, low_open=True)] = 1e-6
    """Peak learning rate of Adam."""
    min_lr: NonNegative = 0.0
    """Learning rate to which the decay leads: the step after the run's last one would have it."""
    lr_warmup_steps: Count = 0
    """Optimizer steps of linear warm-up."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    """Schedule after the warm-up, over the optimizer steps of the whole run; `WSD` stays at the peak, then decays."""
    lr_wsd_decay_steps: Positive | None = None
    """Last optimizer steps of the run, over which `WSD` decays."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """How it does."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, of matrices; norms and biases have none."""
    start_weight_decay: NonNegative | None = None
    """Weight decay of the run's first optimizer step, from which it goes to --weight-decay; unset: the same."""
    weight_decay_incr_style: Literal["linear", "cosine"] = "linear"
    """How it goes there."""
    adam_beta1: Beta = 0.9
    """Decay of Adam's first moment."""
    adam_beta2: Beta = 0.98
    """Decay of Adam's second moment."""
    clip_grad: NonNegative = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    save_optim: bool = True
    """Keep Adam's moments in checkpoints; without them these are a third as large, and a run that goes on begins with
    moments of 0."""
    load_optim: bool = True
    """Take Adam's moments from the checkpoint of --load."""
    max_skipped_steps: Count = 3
    """Optimizer steps in a row that are left out because a gradient is not finite; one more ends the run."""


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Trainer resources and parallel layout (data parallelism is what is left over)"""

    actor_num_nodes: Positive = 1
    """Machines of the trainer."""
    actor_num_gpus_per_node: Positive | None = None
    """Trainer ranks per machine: GPUs, or processes where there is none. Unset: as many as the parallel sizes need."""
    tensor_model_parallel_size: Positive = 1
    """Ranks that share each layer."""
    pipeline_model_parallel_size: Positive = 1
    """Ranks that share the stack of layers."""
    context_parallel_size: Positive = 1
    """Ranks that share each sequence; only 1 is available."""
    expert_model_parallel_size: Positive = 1
    """Ranks that share the experts of a mixture-of-experts model."""
    sequence_parallel: bool = False
    """Split activations along the sequence between tensor-parallel ranks."""
    use_distributed_optimizer: bool = False
    """Split the optimizer's state over data-parallel ranks."""
    recompute_activations: bool = False
    """Recompute MLPs in the backward pass in place of keeping their activations. More is saved, at the cost of a whole
    forward pass, by `--recompute-granularity full --recompute-method uniform --recompute-num-layers 1`."""
    distributed_timeout_minutes: Positive = 30
    """Longest wait in minutes for a collective of the trainer's ranks; then the run ends."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def world_size(self) -> int:
        """Trainer ranks, all together."""
        return self.actor_num_nodes * (self.actor_num_gpus_per_node or 1)

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model in the trainer."""
        return self.world_size // self.model_parallel_size


@dataclass(frozen=True, kw_only=True)
class ColocationOptions:
    """Trainer and engines on the same devices"""

    colocate: bool = False
    """Put trainer and engines on the same devices, on which they take turns: whose turn is over gives its memory back
    (docs/colocate.md). Engines then have the GPUs of the trainer: --rollout-num-gpus follows from it."""
    offload_train: bool | None = None
    """With --colocate: ranks move weights and optimizer to host memory, and drop gradients, while engines generate.
    Unset: on."""
    offload_rollout: bool | None = None
    """With --colocate: engines drop weights and KV cache while the trainer has its turn, and load the weights that are
    published then. Unset: on."""


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """Weight sync from trainer to engines"""

    weight_sync_transport: Literal["broadcast", "ipc", "disk"] | None = None
    """Way of the weights to all engines: collective broadcast (NCCL, gloo); `ipc`: each maps the files that are
    published in the memory of the one machine; or each loads them from a disk. Unset: `ipc` on one machine without
    GPUs, and where trainer and engine share a GPU; else broadcast."""
    weight_snapshot_dir: str | None = None
    """Folder in which the newest weights are published, for engines that start or return and for `disk`. Unset:
    shared memory (one copy of the weights), with `disk` the run folder. For models too large for that, a folder on a
    disk; with engines on several machines, one that all of them see."""
    update_weight_buffer_size: Positive = 512 * 1024 * 1024
    """Bytes of one bucket."""
    pause_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What engines do with requests in flight during an update."""


@dataclass(frozen=True, kw_only=True)
class TrackingOptions:
    """Tracking"""

    store_train_tokens: bool | None = None
    """Store with each token what it was trained with: advantage, log-probabilities of trainer and reference, ratio.
    Unset: on where a rollout has at most 4 million tokens."""
    tensorboard: bool = True
    """Write TensorBoard files into the run folder."""
    use_wandb: bool = False
    """Also report to Weights & Biases (needs the package wandb)."""
    wandb_project: str = "agentrl"
    """Project in Weights & Biases."""


@dataclass(frozen=True, kw_only=True)
class PassedOn:
    """Handed on to SGLang and Megatron"""

    sglang: dict[str, Any] = field(default_factory=dict)
    """Arguments of the SGLang server: any `--sglang-NAME VALUE`, or the table `[sglang]` of a file."""
    allow_remote_code: bool = False
    """Take server arguments by which code of others is run, such as `--sglang-trust-remote-code`: the model folder's, a
    named module's, what clients send."""


@dataclass(frozen=True, kw_only=True)
class MegatronPassedOn:
    """Handed on to Megatron-core"""

    megatron: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig by their own flags
    (`--adam-eps 1e-6`), or the table `[megatron]` of a file."""


@dataclass(frozen=True, kw_only=True)
class Config(
    OptionSet,
    MegatronPassedOn,
    PassedOn,
    StartOptions,
    DebugOptions,
    RunOptions,
    FaultOptions,
    SeedOptions,
    TrackingOptions,
    TrainingEvaluationOptions,
    EvaluationOptions,
    CheckpointOptions,
    SyncOptions,
    ColocationOptions,
    ParallelOptions,
    OptimizerOptions,
    CriticOptions,
    AlgorithmOptions,
    SamplingOptions,
    LimitOptions,
    ReplayOptions,
    AsyncOptions,
    LoopOptions,
    DatedTemplateOptions,
    EngineOptions,
    ModelOptions,
    SupervisedOptions,
    EnvironmentOptions,
):
    """Options of ``agentrl train``. Made by :func:`agentrl.config.load_config`, which fills what follows."""

    @property
    def is_supervised(self) -> bool:
        """Whether written conversations, or stored trajectories, are learned: nothing is played then."""
        return self.loss_type == "sft_loss"

    @property
    def plays(self) -> bool:
        """Whether episodes are played, so that there are engines, environments and a rollout manager."""
        return not self.is_supervised and not self.debug_train_only

    @property
    def replayed_groups(self) -> int:
        """Groups of a batch that are of earlier rollouts."""
        return round(self.replay_share * self.rollout_batch_size)

    @property
    def trains(self) -> bool:
        """Whether there is a trainer."""
        return not self.debug_rollout_only

    @property
    def takes_turns(self) -> bool:
        """Whether there are two sides on the same devices."""
        return self.colocate and self.plays and self.trains


@dataclass(frozen=True, kw_only=True)
class TrainerOptions(
    Section,
    MegatronPassedOn,
    SeedOptions,
    ParallelOptions,
    OptimizerOptions,
    CriticOptions,
    AlgorithmOptions,
    SamplingOptions,
    LoopOptions,
    ModelOptions,
):
    """What the ranks of the trainer read of a run's options: ``config.section(TrainerOptions)``."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedEnvironments(EnvironmentOptions):
    """Environment and data"""

    env: tuple[str, ...] = ()  # type: ignore[assignment]
    """The environment: a registered name (`search`), `module:Class` or `path/to/file.py:Class`. Repeatable, or several
    with commas between: each is a set of its own. The arguments of one of several are `--env-arg NAME.KEY=VALUE`."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(
    OptionSet,
    PassedOn,
    RunOptions,
    SeedOptions,
    EvaluationRunOptions,
    EvaluationOptions,
    LimitOptions,
    ServerOptions,
    DatedTemplateOptions,
    EngineOptions,
    ModelOptions,
    EvaluatedEnvironments,
):
    """Options of ``agentrl eval``; shares names and meaning with :class:`Config`."""

    def env_spec(self) -> tuple[str, dict[str, Any]]:
        """``(spec, kwargs)`` of prompt data, or of the first environment."""
        if self.prompt_data is not None or not self.env:
            return super().env_spec()
        alone = self.arguments_of(None) if len(self.env) == 1 else {}
        return self.env[0], alone


@dataclass(frozen=True, kw_only=True)
class ServeOptions(PassedOn, TemplateOptions, RunCheckpoint, ModelOptions):
    """Serving"""

    served_model_name: str | None = None
    """Name that clients ask for; unset: the folder's name, or `RUN@STEP`."""
    host: str = "127.0.0.1"
    """Address to listen on. Other than loopback only in a network you trust: traffic is not encrypted."""
    port: Annotated[int, Range(low=0, high=65535)] = 8000
    """Port; 0 takes a free one, which is printed."""
    api_key: bool = True
    """Ask clients for a key. --no-api-key is taken on loopback only."""
    tool_call_parser: str = "auto"
    """SGLang's parser of tool calls, which turns them into `tool_calls`; `auto` takes the one of the chat template,
    `none` leaves calls in the text."""
    reasoning_parser: str = "auto"
    """SGLang's parser of reasoning, which turns it into `reasoning_content`; `auto` takes the one of the chat
    template, `none` leaves it in the text."""
    context_length: Positive | None = None
    """Most tokens of prompt and answer together; unset: what the model was made for."""
    rollout_num_engines: Positive = 1
    """Number of SGLang engines behind the address."""
    rollout_num_gpus_per_engine: Positive = 1
    """GPUs of one engine (its tensor-parallel size)."""
    router_policy: Literal["cache_aware", "round_robin", "random"] = "cache_aware"
    """How the router chooses an engine; `cache_aware` sends a conversation where its beginning is cached."""
    engine_timeout: Seconds = 600.0
    """Longest wait in seconds for an engine to start."""
    seed: Count = 0
    """Seed of sampling."""
    log_dir: PathText | None = None
    """Folder for the logs of engines and router; unset: they are gone with the server."""
