"""What a chat template puts between a sampled turn and the next one, learned from dummy conversations.

For each *shape* of a turn (has it reasoning, how many calls, which roles follow, …) a conversation of
marks is rendered twice: up to the generation prompt that the turn was sampled after, and with the turn and what
follows it. From that follows whether the template still writes all that was sent and sampled, where
the suffix begins, and whether observations stand in it verbatim, so that later ones of the
same shape are filled in without running the template again.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentrl.errors import EnvError
from agentrl.rollout.template.encoding import any_of
from agentrl.tools.formats import FORMATS

Render = Callable[..., str]
_MAX_PLANS = 1024  # shapes are few; a bound all the same, since roles come from environments
_FIELDS = ("content", "name", "tool_call_id")
_PLAIN_WORD = re.compile(r"[\w.:\-]+\Z")


class Earlier(NamedTuple):
    """An earlier turn of the conversation: what it held, and the roles that answered it."""

    reasoning: bool
    content: bool
    roles: tuple[str, ...]

    @classmethod
    def of(cls, assistant: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> Earlier:
        roles: tuple[str, ...] = (answers[0]["role"],)
        for message in answers[1:]:
            if message["role"] != roles[-1]:
                roles += (message["role"],)
        return cls(*_said(assistant), roles)


class Shape(NamedTuple):
    """All that a template can look at in a conversation, save the words."""

    reasoning: bool
    content: bool
    calls: int
    markup: tuple[tuple[str, ...], tuple[str, ...]]  # of the sampled text, see ExtensionPlanner.markup
    roles: tuple[str, ...]
    fields: tuple[tuple[bool, ...], ...]
    tools: bool
    earlier: tuple[Earlier, ...] = ()  # one of each kind, the latest last
    system: bool = False


def _said(message: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a message has reasoning, and whether it has content."""
    return bool((message.get("reasoning_content") or "").strip()), bool((message.get("content") or "").strip())


@dataclass(frozen=True)
class _Plan:
    """How to get the suffix: ``parts`` filled in; the template run (``parts`` None); or not at all."""

    extends: bool
    parts: tuple[str | tuple[int, str], ...] | None = None
    trims: bool = False


class ExtensionPlanner:
    """Finds suffixes for one template.

    Args:
        render: ``(messages, tools, *, generation=True) -> str``; raises EnvError.
        controls: texts of the model's control tokens.
        eos_texts: of those, the ones that end a turn.
    """

    def __init__(self, render: Render, controls: Sequence[str], eos_texts: tuple[str, ...]) -> None:
        self._render = render
        self._eos_texts = eos_texts
        self._plans: dict[Shape, _Plan] = {}
        self._marks = _Marks(secrets.token_hex(2))
        tags = {tag for parser in FORMATS.values() for pair in parser.reasoning_tags.items() for tag in pair}
        self._tag = re.compile(any_of(tags))
        self._begins = {tag[0] for tag in tags}
        self._lead = re.compile(rf"\s*({any_of({*controls, *tags})})")

    def shape(
        self,
        assistant: Mapping[str, Any],
        text: str,
        new_messages: Sequence[Mapping[str, Any]],
        tools: bool,
        earlier: tuple[Earlier, ...],
        system: bool,
    ) -> Shape:
        """The shape of a conversation whose last turn was sampled as ``text`` and is ``assistant`` to the template."""
        content, calls = assistant.get("content") or "", len(assistant.get("tool_calls") or ())
        lead, tags = self.markup(text)
        # What the parser left in the content, a call that cannot be read say, the template writes as it is.
        kept, _ = self.markup(content) if lead and content else ((), ())
        if kept and lead[-len(kept) :] == kept:
            lead = lead[: -len(kept)]
        roles = tuple([m["role"] for m in new_messages])
        fields = tuple([("content" in m, "name" in m, "tool_call_id" in m) for m in new_messages])
        return Shape(*_said(assistant), calls, (() if calls else lead, tags), roles, fields, tools, earlier, system)

    def markup(self, text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The control tokens that a turn begins with, and the tags around what it thinks, empty blocks too."""
        lead, at = [], 0
        while match := self._lead.match(text, at):
            lead.append(match.group(1))
            at = match.end()
        # Most of a turn lies before the first letter that a tag may begin with, which is found much sooner than a tag.
        first = len(text)
        for letter in self._begins:
            if (at := text.find(letter, 0, first)) >= 0:
                first = at
        return tuple(lead), tuple(self._tag.findall(text, first))

    def suffix(self, shape: Shape, new_messages: Sequence[dict[str, Any]], called: Iterable[str] = ()) -> str | None:
        """Rendered text from the end-of-turn token on (or from the end of the sampled text, where the
        template has none), up to the opening of the next assistant turn. None: the template cannot extend.

        ``called`` are the names of the tools that the turn called: some templates write them over the results.
        """
        plan = self._plans.get(shape)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[shape] = self._make_plan(shape)
        if not plan.extends:
            return None
        if plan.parts is not None and _fits(plan, new_messages):
            suffix = "".join([p if isinstance(p, str) else new_messages[p[0]][p[1]] for p in plan.parts])
        else:
            found = self._try_suffix(shape, list(new_messages))
            if found is None:
                return None
            suffix = found[1]
        if self._marks.tool_mark in suffix:
            for i, name in enumerate(called):
                mark = self._marks.tool(i)
                if mark in suffix:
                    if not _PLAIN_WORD.match(name):
                        return None
                    suffix = suffix.replace(mark, name)
        return suffix

    def _make_plan(self, shape: Shape) -> _Plan:
        marks = self._marks
        messages = [marks.observation(i, role, shape.fields[i]) for i, role in enumerate(shape.roles)]
        found = self._try_suffix(shape, messages)
        if found is None:
            return _Plan(extends=False)
        rendered, suffix = found
        if any(text in suffix for text in marks.said_before):
            return _Plan(extends=False)  # it moves the tools or the system text: what was sent is not a prefix
        for i, message in enumerate(messages):
            if marks.inner(i) not in suffix:
                raise EnvError(
                    f"the chat template drops messages of role {message['role']!r} after an assistant turn; "
                    f"give the observation the role 'user', or pass a chat_template that renders it"
                )
        return self._literal_plan(suffix, messages) or _Plan(extends=True)

    def _literal_plan(self, suffix: str, messages: list[dict[str, Any]]) -> _Plan | None:
        """The suffix as literal parts and holes; None when an observation does not stand in it verbatim."""
        trims = False
        holes: dict[str, tuple[int, str]] = {}
        for i, message in enumerate(messages):
            content = message["content"]
            if content not in suffix:
                trims, content = True, content.strip()
            if suffix.count(content) != 1 or suffix.count(self._marks.inner(i)) != 1:
                return None
            holes[content] = (i, "content")
            holes |= {message[f]: (i, f) for f in _FIELDS[1:] if f in message}
        pattern = re.compile("(" + "|".join(map(re.escape, sorted(holes, key=len, reverse=True))) + ")")
        parts = tuple(holes.get(piece, piece) for piece in pattern.split(suffix) if piece)
        return _Plan(extends=True, parts=parts, trims=trims)

    def _try_suffix(self, shape: Shape, new_messages: list[dict[str, Any]]) -> tuple[str, str] | None:
        """(whole rendering, suffix), or None when the template refuses or does not keep what was there."""
        ids = [m["tool_call_id"] for m in new_messages if "tool_call_id" in m]
        # Some templates refuse several calls in a turn, some a system message, some results.
        pairs = ((shape.earlier, ()), (shape.system, False), (shape.calls, 0))
        choices: list[dict[Any, None]] = [dict.fromkeys(pair) for pair in pairs]
        for earlier, system, calls in itertools.product(*choices):
            try:
                return self._locate(shape._replace(system=system, earlier=earlier), calls, ids, new_messages)
            except EnvError:
                continue
        return None

    def _locate(
        self, shape: Shape, calls: int, call_ids: list[str], new_messages: list[dict[str, Any]]
    ) -> tuple[str, str] | None:
        marks = self._marks
        tools = marks.tools() if shape.tools else None
        history = marks.history(shape)
        sent = self._render(history, tools)
        rendered = self._render([*history, marks.assistant(shape, calls, call_ids), *new_messages], tools)
        if not rendered.startswith(sent):
            return None
        end = len(sent)
        for mark in marks.sampled(shape, calls):
            at = rendered.find(mark, end)
            if at < 0:
                return None
            end = at + len(mark)
        first_new = rendered.find(new_messages[0]["content"].strip() or "\0", end)
        limit = first_new if first_new >= 0 else len(rendered)
        ends = [at for text in self._eos_texts if (at := rendered.find(text, end, limit)) >= 0]
        if calls and not ends:
            return None
        end = min(ends, default=end)
        lead, tags = self.markup(rendered[len(sent) : end])
        # A call may be written in several ways (Llama's with or without <|python_tag|>): as sampled, it stays.
        if tags != shape.markup[1] or (not shape.calls and lead != shape.markup[0]):
            return None
        return rendered, rendered[end:]


class _Marks:
    """The words of the dummy conversation: findable, and for observations hard to pass through unchanged."""

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce
        self.user = f"{nonce}ask"
        self.reasoning = f"{nonce}why"
        self.content = f"{nonce}say"
        self.tools_text = f"{nonce}tools"
        self.tool_mark = f"{nonce}tool"
        self.system = f"{nonce}system"
        self.early = f"{nonce}early"
        self.said_before = (self.tools_text, self.system, self.user, self.early, self.reasoning, self.content)

    def inner(self, i: int) -> str:
        return f"{self._nonce}obs{i:02d}"

    def observation(self, i: int, role: str, fields: tuple[bool, ...]) -> dict[str, Any]:
        # Quotes, a backslash and white space at both ends show escaping and trimming.
        content = f"\n {self.inner(i)} \"\\\n\t<é>&{{}}' end{i:02d} \n"
        # Nine letters and digits: the form that the strictest templates (Mistral) demand of a call id.
        values = (content, f"{self._nonce}fn{i:02d}", f"{self._nonce}id{i:03d}")
        present = zip(_FIELDS, values, (True, *fields[1:]), strict=True)
        return {"role": role, **{name: value for name, value, there in present if there}}

    def tools(self) -> list[dict[str, Any]]:
        argument = {"type": "string", "description": "An argument."}
        parameters = {"type": "object", "properties": {"argument": argument}, "required": ["argument"]}
        function = {"name": "probe", "description": self.tools_text, "parameters": parameters}
        return [{"type": "function", "function": function}]

    def tool(self, i: int) -> str:
        """The name of the tool that call ``i`` calls."""
        return f"{self.tool_mark}{i:02d}"

    def call(self, i: int, call_id: str | None = None) -> dict[str, Any]:
        function = {"name": self.tool(i), "arguments": {"argument": f"{self._nonce}arg{i:02d}"}}
        return {"id": call_id or f"{self._nonce}id{i:03d}", "type": "function", "function": function}

    def history(self, shape: Shape) -> list[dict[str, Any]]:
        history: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if shape.system else []
        history.append({"role": "user", "content": self.user})
        for number, turn in enumerate(shape.earlier):
            history += self._earlier(turn, 10 * number + 10)
        return history

    def _earlier(self, turn: Earlier, first: int) -> list[dict[str, Any]]:
        """An earlier turn and what answered it; marks are numbered from ``first``."""
        calls = [self.call(first + i) for i, role in enumerate(turn.roles) if role == "tool"]
        said = f"{self.early}said{first}" if turn.content or not calls else ""
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if turn.reasoning:
            message["reasoning_content"] = f"{self.early}why{first}"
        if calls:
            message["tool_calls"] = calls
        answers: list[dict[str, Any]] = []
        for i, role in enumerate(turn.roles):
            answer = {"role": role, "content": f"{self._nonce}seen{first + i}"}
            if role == "tool":
                answer |= {"tool_call_id": self.call(first + i)["id"], "name": "probe"}
            answers.append(answer)
        return [message, *answers]

    def assistant(self, shape: Shape, calls: int, call_ids: list[str]) -> dict[str, Any]:
        has_content = shape.content or not calls
        message: dict[str, Any] = {"role": "assistant", "content": self.content if has_content else ""}
        if shape.reasoning:
            message["reasoning_content"] = self.reasoning
        if calls:
            ids = [*call_ids, *[None] * calls]
            message["tool_calls"] = [self.call(i, ids[i]) for i in range(calls)]
        return message

    def sampled(self, shape: Shape, calls: int) -> list[str]:
        """The marks that stand for sampled text, in the order a template writes them."""
        marks = [self.reasoning] if shape.reasoning else []
        if shape.content or not calls:
            marks.append(self.content)
        return marks + [f"{self._nonce}arg{i:02d}" for i in range(calls)]


def _fits(plan: _Plan, messages: Sequence[dict[str, Any]]) -> bool:
    """Whether the words of ``messages`` would pass through the template unchanged."""
    for message in messages:
        content = message["content"]
        # Templates test for empty content; they trim, if at all, white space at the ends.
        if not content or (plan.trims and content != content.strip()):
            return False
        for name in _FIELDS[1:]:
            if name in message and not _PLAIN_WORD.match(message[name]):
                return False
    return True
