"""Options of held-out evaluation: those that training and ``agentrl eval`` share, and those of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from agentrl.config.options import Count, NonNegative, PathText, Positive, Probability, Range, Seconds


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
class EvaluationRunOptions:
    """Evaluation run"""

    run: PathText | None = None
    """Training run of which a checkpoint is evaluated, with that run's environment and limits; in place of
    --hf-checkpoint."""
    checkpoint: str = "newest"
    """Checkpoint of --run: `newest`, `best` (see --best-metric of training), or its number of rollouts."""
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
