"""Prompts to token ids and token ids to text: the only place where either happens.

Invariant: preflight, rollout, validation and supervised fine-tuning see the same ids for a prompt, and a control token
in them was written by the chat template or not at all. Text of a data row that spells a control token (`<|im_end|>`)
is refused with the row: it could forge a turn, and leaving it out would train on another text than the row's.
"""

from collections.abc import Sequence

import jinja2
from transformers import PreTrainedTokenizerBase

from ..errors import ConfigError, DataError
from ..types import Prompt

MAX_LISTED = 5


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The tokens that steer the model, by id. Added tokens that are not marked special are text (case T04)."""
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def render_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, *, apply_chat_template: bool | None) -> list[int]:
    """Token ids of a prompt.

    With a chat template (`apply_chat_template` none: where the tokenizer has one) the turns and the head of the
    answer's turn; without, the text of the turns, one a line, and no special token added.

    Raises:
        DataError: the row (named by uid) spells a control token, holds a character that the tokenizer lacks, is
            refused by the template, or gives no token.
        ConfigError: the template is asked for and there is none.
    """
    with_template = bool(tokenizer.chat_template) if apply_chat_template is None else apply_chat_template
    if with_template and not tokenizer.chat_template:
        raise ConfigError(
            "data.apply_chat_template is true, but the model's tokenizer has no chat template; set it to false or use "
            "a model that has one."
        )
    control = set(control_tokens(tokenizer).values())
    for turn in prompt.messages:
        _check_text(turn["role"], control, f"row {prompt.uid}, a turn's role")
        _check_text(turn["content"], control, f"row {prompt.uid}, {turn['role']} turn")
    if not with_template:
        text = "\n".join(turn["content"] for turn in prompt.messages)
        return encode_text(text, tokenizer, where=f"row {prompt.uid}")
    for turn in prompt.messages:
        _check_known(turn["content"], tokenizer, f"row {prompt.uid}, {turn['role']} turn")
    ids = tokenizer.encode(_through_template(prompt, tokenizer), add_special_tokens=False)
    if not ids:
        raise DataError(f"row {prompt.uid}: the chat template made no token of it.")
    return ids


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase, *, where: str) -> list[int]:
    """Token ids of plain text, no special token added; for a worked example's answer too.

    Raises DataError beginning with `where`, as `render_prompt` does.
    """
    _check_text(text, set(control_tokens(tokenizer).values()), where)
    _check_known(text, tokenizer, where)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise DataError(f"{where}: the tokenizer made no token of {text!r:.60}.")
    return ids


def _through_template(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        text = tokenizer.apply_chat_template(
            [dict(turn) for turn in prompt.messages], tokenize=False, add_generation_prompt=True
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        roles = ", ".join(turn["role"] for turn in prompt.messages)
        raise DataError(
            f"row {prompt.uid}: the model's chat template refuses the turns {roles}: {error}. Change the row, "
            "data.system_prompt, or set data.apply_chat_template=false."
        ) from error
    assert isinstance(text, str)
    return text


def _check_text(text: str, control: set[str], where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: half a character (lone surrogate) at place {error.start}.") from error
    spelled = sorted(token for token in control if token and token in text)
    if spelled:
        raise DataError(
            f"{where}: the text holds the control token {', '.join(spelled)}, which could forge a turn; take it out of "
            "the row."
        )


def _check_known(text: str, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """An unknown token in text that spells no control token stands for a character that the tokenizer lacks."""
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown not in tokenizer.encode(text, add_special_tokens=False):
        return
    characters = [
        character
        for character in dict.fromkeys(text)
        if unknown in tokenizer.encode(character, add_special_tokens=False)
    ]
    named = ", ".join(map(repr, characters[:MAX_LISTED])) or "some of its characters"
    raise DataError(f"{where}: the tokenizer has no token for {named}; change the text or the model's alphabet.")


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
    rendered: list[list[int]] = []
    faults: list[str] = []
    for prompt in prompts:
        try:
            rendered.append(render_prompt(prompt, tokenizer, apply_chat_template=apply_chat_template))
        except DataError as error:
            faults.append(str(error))
    if faults:
        raise DataError(_listed(f"{len(faults)} of {len(prompts)} prompts cannot be turned into tokens:", faults))
    overlong = [
        f"row {prompt.uid}: {len(ids)} tokens, {max_prompt_length} allowed"
        for prompt, ids in zip(prompts, rendered, strict=True)
        if len(ids) > max_prompt_length
    ]
    if overlong:
        raise DataError(
            _listed(
                f"{len(overlong)} of {len(prompts)} prompts are longer than data.max_prompt_length={max_prompt_length}"
                "; shorten them or raise it:",
                overlong,
            )
        )
    return rendered


def _listed(head: str, rows: list[str]) -> str:
    more = [f"and {len(rows) - MAX_LISTED} more"] if len(rows) > MAX_LISTED else []
    return "\n  ".join([head, *rows[:MAX_LISTED], *more])
