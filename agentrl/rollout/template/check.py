"""The chat template of a checkpoint and its call format, tried out before engines start.

One call is rendered by the template and read back by the format's parser: a format that was only guessed from a few
words of the template is not used. Two short dialogs are played as an episode would, and what the engine would be sent
is compared with what the template renders from the whole conversation.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from agentrl.errors import ConfigError, EnvError
from agentrl.tools.formats import get_parser
from agentrl.types import Message

if TYPE_CHECKING:
    from agentrl.rollout.template.chat import ChatTemplate
    from agentrl.rollout.template.rendering import Renderer

_PROPERTIES = {
    "text": {"type": "string", "description": "A text."},
    "number": {"type": "integer", "description": "A number."},
    "flag": {"type": "boolean", "description": "Yes or no."},
    "items": {"type": "array", "items": {"type": "string"}, "description": "Some texts."},
    "options": {"type": "object", "description": "Anything."},
}
_ARGUMENTS = {"text": "two words", "number": 3, "flag": True, "items": ["a", "b"], "options": {"key": "value"}}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": list(_PROPERTIES)}
_TOOLS = [
    {"type": "function", "function": {"name": "lookup", "description": "Looks.", "parameters": _PARAMETERS}},
]
_CALL_IDS = ("call00001", "functions.lookup:0")  # of nine letters and digits, or with the tool's name in it
_QUESTION = Message(role="user", content="Is it there?")
_RESULT = Message(role="tool", name="lookup", content="It is there.")
_ANSWER = Message(role="assistant", content="Yes, it is.", reasoning_content="It is there.")
_REMEDY = (
    "Give the environment another call_format (--env-arg call_format=NAME; 'tags:<tool>,answer' works with any model "
    "when the prompt explains it), or the model another chat template"
)
_SHOWN = 300  # characters of a turn in a message


@dataclass(frozen=True)
class Trial:
    """A call as the template renders it, and as the format reads it."""

    call_format: str
    rendered: str
    read: str
    """The calls that were read, or why none could be rendered."""
    holds: bool
    """Whether the call came back: its name, all its arguments, and the text among them as it was."""
    exact: bool
    """Whether every argument came back as it was."""
    call_id: str = _CALL_IDS[0]
    """An id of the form that the family takes."""


def try_format(renderer: Renderer, call_format: str) -> Trial:
    """Renders a call and reads it back."""
    trials = []
    for call_id in _CALL_IDS:
        trials.append(_trial(renderer, call_format, call_id))
        if trials[-1].holds:
            return trials[-1]
    return trials[0]


def _trial(renderer: Renderer, call_format: str, call_id: str) -> Trial:
    parser = get_parser(call_format).with_tools(_TOOLS)
    try:
        rendered = rendered_turn(renderer, _silent(_calling(call_id)), _TOOLS)
    except EnvError as error:
        return Trial(call_format, "", str(error), holds=False, exact=False)
    calls = parser.parse(rendered).tool_calls
    read = "; ".join(f"{c.name}({c.arguments})" if c.error is None else f"an error: {c.error}" for c in calls)
    came_back = len(calls) == 1 and calls[0].name == "lookup" and calls[0].error is None
    arguments = calls[0].arguments if came_back else {}
    holds = came_back and arguments.keys() == _ARGUMENTS.keys() and arguments["text"] == _ARGUMENTS["text"]
    return Trial(call_format, rendered, read or "no call", holds, exact=arguments == _ARGUMENTS, call_id=call_id)


def _calling(call_id: str) -> Message:
    call = {"id": call_id, "type": "function", "function": {"name": "lookup", "arguments": _ARGUMENTS}}
    return Message(role="assistant", content="", reasoning_content="I look it up.", tool_calls=[call])


def rendered_turn(renderer: Renderer, message: Any, tools: Any) -> str:
    """An assistant message as the template writes it, from where the model begins to write.
    Raises EnvError: the template refuses the message."""
    prompt = renderer.render([_QUESTION], tools)
    whole = renderer.render([_QUESTION, message], tools, generation=False)
    shared = len(os.path.commonprefix([prompt, whole]))
    if shared < len(prompt):  # the history lacks the end of the generation prompt: go back to where a word begins
        shared = max(whole.rfind(end, 0, shared) for end in ">\n]") + 1
    return whole[shared:]


def check_template(chat: ChatTemplate, *, tools: bool, training: bool = True) -> list[str]:
    """Tries the template out; gives what a person should know, a line each. ``tools``: the environment has some, and
    leaves the call format to the template. ``training``: it matters what the trajectories look like, and not the
    answers alone.
    Raises ConfigError: the environment has tools, and calls cannot be read as the template writes them."""
    if not chat.template_source:
        return []
    notes = []
    trial = chat.trial
    if chat.call_format == "none":
        problem = no_format(chat)
        if tools:
            raise ConfigError(f"{problem}. {_REMEDY}")
        if chat.takes_tools:
            notes.append(f"{problem}; what such a model writes around its answer stays in the text that rewards see")
        return notes
    assert trial is not None
    if not trial.exact:
        notes.append(
            f"the chat template writes {_ARGUMENTS} in a form that is read back in the format "
            f"{chat.call_format!r} as {trial.read}"
        )
    if not training:
        return notes
    if tools:
        notes += _played(chat, _calling(trial.call_id), _RESULT, _TOOLS, "after each call")
    return notes + _played(chat, _ANSWER, _QUESTION, None, "at each new message of the user")


def no_format(chat: ChatTemplate) -> str:
    """Why calls cannot be read as the template writes them."""
    trial = chat.trial
    if trial is None:
        takes = "takes tools in a form that is not known here" if chat.takes_tools else "takes no tools"
        return f"the chat template of {chat.name} {takes}"
    if not trial.rendered:
        return f"the chat template of {chat.name} seems to be of the format {trial.call_format!r}, but {trial.read}"
    return (
        f"the chat template of {chat.name} seems to be of the call format {trial.call_format!r}, but a call of "
        f"lookup({_ARGUMENTS}), which it renders as {trial.rendered[:_SHOWN]!r}, is read back as {trial.read[:_SHOWN]}"
    )


def _played(chat: ChatTemplate, said: Message, answer: Message, tools: Any, when: str) -> list[str]:
    """A turn and what follows it, as an episode sends them, beside the whole conversation rendered."""
    try:
        prompt = chat.prompt([_QUESTION], tools)
        sampled = _as_sampled(chat, said, tools)
        text = chat.text(sampled, chat.opening_of(prompt))
        parsed = get_parser(chat.call_format).with_tools(_TOOLS).parse(text)
        message = chat.history_message(text, parsed, chat.call_format)
        for call in parsed.tool_calls:
            answer = Message(**answer, tool_call_id=call.id)
        following = chat.extension(message, sampled, [answer], tools)
        if following is None:
            return [f"the chat template rewrites what came before {when}: a new segment of the trajectory begins there"]
        sent = chat.decode(np.concatenate([prompt, sampled, following]))
        whole = chat.decode(chat.prompt([_QUESTION, message, answer], tools))
    except EnvError as error:
        if tools is not None:
            raise ConfigError(f"{chat.name} cannot hold a conversation with tools, {error}. {_REMEDY}") from error
        return [f"{when} no conversation can go on: {error}"]
    if sent == whole:
        return []
    at = len(os.path.commonprefix([sent, whole]))
    return [
        f"{when} the engine is sent {sent[at - 20 : at + 60]!r} where the chat template, given the whole conversation, "
        f"writes {whole[at - 20 : at + 60]!r}: the words that were sent are kept"
    ]


def _as_sampled(chat: ChatTemplate, said: Message, tools: Any) -> np.ndarray:
    """The ids that a model would sample for this turn: what the template writes, up to the token that ends it."""
    prompt = chat.renderer.render([_QUESTION], tools)
    for turn in (said, _silent(said)):  # the template's own way of thinking or not
        text = rendered_turn(chat.renderer, turn, tools)
        if chat.renderer.render([_QUESTION, turn], tools, generation=False).startswith(prompt):
            break
    else:
        if chat.opening:  # the history drops the reasoning that the prompt opens
            text = f"{said['reasoning_content']}\n</think>\n\n{text}"
    ids = chat.encoder.encode_after_control(text)
    ends = np.flatnonzero(np.isin(ids, chat.eos_token_ids))
    return ids[: ends[0] + 1] if len(ends) else ids


def _silent(message: Message) -> Message:
    return cast(Message, {key: value for key, value in message.items() if key != "reasoning_content"})
