"""Prompts to token ids and token ids to text: the only place where either happens.

Invariant: preflight, rollout, validation and supervised fine-tuning see the same ids for a prompt, and a control token
in them was written by the chat template or not at all. Text of a data row that spells a control token (`<|im_end|>`)
is refused with the row: it could forge a turn, and leaving it out would train on another text than the row's.
"""

import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import jinja2
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, TokenizersBackend

from ..datasets.report import CONTROL_TOKEN, listed
from ..datasets.token_rows import TokenRows
from ..errors import ConfigError, DataError
from ..types import Prompt

MAX_LISTED = 5
CHUNK = 1024
"""prompts that are encoded in one call"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderFault:
    """Why a prompt cannot be turned into ids."""

    uid: str
    place: str
    """`, user turn` or empty"""
    kind: str
    """what is counted, without what differs from row to row"""
    reason: str

    def __str__(self) -> str:
        return f"row {self.uid}{self.place}: {self.reason}"


class _TextFaultError(DataError):
    """A text that cannot be encoded; `kind` is what is counted."""

    kind: str = ""


def _text_fault(kind: str, reason: str) -> _TextFaultError:
    fault = _TextFaultError(reason)
    fault.kind = kind
    return fault


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The tokens that steer the model, by id. Added tokens that are not marked special are text (case T04)."""
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


class Renderer:
    """Turns prompts into ids: the one that preflight, `check-data`, rollout and validation use.

    `apply_chat_template`: none is where the tokenizer has one. With a template the turns and the head of the answer's
    turn; without, the text of the turns, one a line, and no special token added.

    Raises ConfigError: the template is asked for and there is none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, apply_chat_template: bool | None) -> None:
        self.tokenizer = tokenizer
        self.with_template = bool(tokenizer.chat_template) if apply_chat_template is None else apply_chat_template
        if self.with_template and not tokenizer.chat_template:
            raise ConfigError(
                "data.apply_chat_template is true, but the model's tokenizer has no chat template; set it to false or "
                "use a model that has one."
            )
        self._texts = _Texts(tokenizer)

    def render(self, prompts: Sequence[Prompt]) -> list[list[int] | RenderFault]:
        """Token ids of each prompt, or why there are none: it spells a control token, holds a character that the
        tokenizer lacks, is refused by the template, or gives no token.
        """
        return [row for chunk in self.chunks(prompts) for row in chunk]

    def chunks(self, prompts: Sequence[Prompt]) -> Iterator[list[list[int] | RenderFault]]:
        """The same in order, `CHUNK` prompts at a time: while the template is filled in for one chunk, those before it
        are encoded by threads, which Python's lock does not hold up.
        """
        threads = len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(threads, "encode") as pool:
            waiting: deque[tuple[Sequence[Prompt], list[str | RenderFault], Future[list[list[int]]]]] = deque()
            for start in range(0, len(prompts), CHUNK):
                chunk = prompts[start : start + CHUNK]
                texts = [self.text(prompt) for prompt in chunk]
                encoded = pool.submit(self._texts.encode, [text for text in texts if isinstance(text, str)])
                waiting.append((chunk, texts, encoded))
                if len(waiting) > threads:
                    yield self._joined(*waiting.popleft())
            while waiting:
                yield self._joined(*waiting.popleft())

    def text(self, prompt: Prompt) -> str | RenderFault:
        """What is encoded."""
        for turn in prompt.messages:
            for text, place in ((turn["role"], ", a turn's role"), (turn["content"], f", {turn['role']} turn")):
                try:
                    self._texts.check(text)
                except _TextFaultError as fault:
                    return RenderFault(uid=prompt.uid, place=place, kind=fault.kind, reason=str(fault))
        if not self.with_template:
            return "\n".join(turn["content"] for turn in prompt.messages)
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(turn) for turn in prompt.messages], tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = ", ".join(turn["role"] for turn in prompt.messages)
            place = f" ({self.tokenizer.name_or_path})" if self.tokenizer.name_or_path else ""
            reason = (
                f"the model's chat template{place} refuses the turns {roles}: {error}. Change the row, "
                "data.system_prompt, or set data.apply_chat_template=false."
            )
            kind = f"refused by the chat template ({roles})"
            return RenderFault(uid=prompt.uid, place="", kind=kind, reason=reason)
        assert isinstance(text, str)
        return text

    def _joined(
        self, prompts: Sequence[Prompt], texts: list[str | RenderFault], encoded: Future[list[list[int]]]
    ) -> list[list[int] | RenderFault]:
        ids = iter(encoded.result())
        return [
            text if isinstance(text, RenderFault) else self._checked(prompt, text, next(ids))
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def _checked(self, prompt: Prompt, text: str, ids: list[int]) -> list[int] | RenderFault:
        if not ids:
            maker = "chat template" if self.with_template else "tokenizer"
            reason = f"the {maker} made no token of {text!r:.60}."
            return RenderFault(uid=prompt.uid, place="", kind="gives no token", reason=reason)
        if self.tokenizer.unk_token_id not in ids:
            return ids
        # a template may write the unknown token itself; a row may not
        parts = [(turn["content"], f", {turn['role']} turn") for turn in prompt.messages]
        for part, place in parts if self.with_template else [(text, "")]:
            try:
                self._texts.check_known(part)
            except _TextFaultError as fault:
                return RenderFault(uid=prompt.uid, place=place, kind=fault.kind, reason=str(fault))
        return ids


def render_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, *, apply_chat_template: bool | None) -> list[int]:
    """Token ids of one prompt, as `Renderer.render` gives them. Raises DataError with the fault, and ConfigError."""
    (found,) = Renderer(tokenizer, apply_chat_template=apply_chat_template).render([prompt])
    if isinstance(found, RenderFault):
        raise DataError(str(found))
    return found


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase, *, where: str) -> list[int]:
    """Token ids of plain text, no special token added; for a worked example's answer.

    Raises DataError beginning with `where`, as `Renderer.render` names faults.
    """
    texts = _Texts(tokenizer)
    try:
        texts.check(text)
        texts.check_known(text)
    except _TextFaultError as fault:
        raise DataError(f"{where}: {fault}") from fault
    (ids,) = texts.encode([text])
    if not ids:
        raise DataError(f"{where}: the tokenizer made no token of {text!r:.60}.")
    return ids


class _Texts:
    """Texts of one tokenizer: what may not be in them, and their ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        spelled = sorted(filter(None, set(control_tokens(tokenizer).values())), key=len, reverse=True)
        self._control = spelled
        self._spelled = re.compile("|".join(map(re.escape, spelled)) or "(?!)")
        self._first = frozenset(token[0] for token in spelled)
        self._backend = self._plain_backend()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, no special token added; safe in several threads."""
        if not texts:
            return []
        if self._backend is not None:
            # the same ids without the places of each token in the text, which nobody asks for: a third faster
            return [found.ids for found in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        found = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = found["input_ids"]  # pyright: ignore[reportAssignmentType]
        return ids

    def _plain_backend(self) -> Tokenizer | None:
        """The tokenizer beneath, where calling it is all that the outer one would do."""
        self.tokenizer("", add_special_tokens=False)  # takes padding and cutting off, which a tokenizer.json may bring
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        own = type(self.tokenizer)._encode_plus is not TokenizersBackend._encode_plus
        if not isinstance(backend, Tokenizer) or own or getattr(self.tokenizer, "split_special_tokens", False):
            return None
        return backend if backend.padding is None and backend.truncation is None else None

    def check(self, text: str) -> None:
        """Raises _TextFaultError: half a character, or a control token."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _text_fault(
                "half a character", f"half a character (lone surrogate) at place {error.start}."
            ) from error
        # the search costs more than the look at the first characters, and hardly any text holds one
        if self._first.isdisjoint(text) or not self._spelled.search(text):
            return
        spelled = sorted(token for token in self._control if token in text)
        raise _text_fault(
            CONTROL_TOKEN,
            f"the text holds the control token {', '.join(spelled)}, which could forge a turn; take it out of the row.",
        )

    def check_known(self, text: str) -> None:
        """Raises _TextFaultError: an unknown token in text that spells no control token stands for a character that the
        tokenizer lacks.
        """
        unknown = self.tokenizer.unk_token_id
        if unknown is None or unknown not in self.encode([text])[0]:
            return
        characters = list(dict.fromkeys(text))
        lacking = [
            character for character, ids in zip(characters, self.encode(characters), strict=True) if unknown in ids
        ]
        named = ", ".join(map(repr, lacking[:MAX_LISTED])) or "some of its characters"
        raise _text_fault(
            "a character that the tokenizer lacks",
            f"the tokenizer has no token for {named}; change the text or the model's alphabet.",
        )


def decode_response(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, stop_ids: tuple[int, ...]) -> str:
    """Text of a response: without the trailing stop token and without control tokens, else as sampled.

    Bytes that are no whole character become U+FFFD, so that the text can be stored anywhere (case D05).
    """
    kept = list(ids[:-1]) if len(ids) and ids[-1] in stop_ids else list(ids)
    control = control_tokens(tokenizer).keys()
    text = tokenizer.decode(
        [token for token in kept if token not in control],
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )
    assert isinstance(text, str)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def check_prompts(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    apply_chat_template: bool | None,
) -> list[list[int]]:
    """Token ids of every prompt, each of at most `max_prompt_length` tokens.

    Raises one DataError that counts the rows at fault and names the first five: those that cannot be rendered, or else
    those that are too long, with length and bound.
    """
    found = Renderer(tokenizer, apply_chat_template=apply_chat_template).render(prompts)
    refuse_faults([fault for fault in found if isinstance(fault, RenderFault)], len(prompts))
    ids = [ids for ids in found if not isinstance(ids, RenderFault)]
    refuse_overlong([prompt.uid for prompt in prompts], TokenRows.of(ids), max_prompt_length)
    return ids


def refuse_faults(faults: Sequence[object], num_prompts: int) -> None:
    """Raise DataError that counts the prompts that cannot be rendered and names the first five, where there are any."""
    if faults:
        head = f"{len(faults)} of {num_prompts} prompts cannot be turned into tokens (see data.on_bad_row):"
        raise DataError(listed(head, faults, MAX_LISTED))


def refuse_overlong(uids: Sequence[str], ids: TokenRows, max_prompt_length: int) -> None:
    """Raise DataError that counts the prompts that are too long and names the first five, where there are any."""
    overlong = [
        f"row {uid}: {length} tokens, {max_prompt_length} allowed"
        for uid, length in zip(uids, ids.lengths.tolist(), strict=True)
        if length > max_prompt_length
    ]
    if overlong:
        head = (
            f"{len(overlong)} of {len(uids)} prompts are longer than data.max_prompt_length={max_prompt_length}; "
            f"shorten them, raise it to {ids.lengths.max()}, or set data.on_overlong=filter, left or right:"
        )
        raise DataError(listed(head, overlong, MAX_LISTED))
