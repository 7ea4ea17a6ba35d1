r"""One spelling for LaTeX that means the same: `\dfrac12`, `\tfrac{1}{2}` and `\frac 1 2` are `\frac{1}{2}`.

Invariant: what is changed is spelling only, never a value; what is not known stays as it is.
"""

import re

PLAIN = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ",
    "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ",
    "∈": r"\in ", "°": r"^\circ ", "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}", "θ": r"\theta ", "≈": r"\approx ", "，": ",", "\u00a0": " ", "\u202f": " ", "～": " ",
}  # fmt: skip
COMMANDS = {
    "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "dbinom": r"\binom", "tbinom": r"\binom", "left": "",
    "right": "", "bigl": "", "bigr": "", "Bigl": "", "Bigr": "", "big": "", "Big": "", "displaystyle": "",
    "limits": "", "quad": " ", "qquad": " ", "le": r"\leq", "ge": r"\geq", "leqslant": r"\leq", "geqslant": r"\geq",
    "ne": r"\neq", "lt": "<", "gt": ">", "varnothing": r"\emptyset", "lbrace": r"\{", "rbrace": r"\}",
    "lvert": "|", "rvert": "|", "vert": "|", "lbrack": "[", "rbrack": "]", "infin": r"\infty", "degree": r"^\circ",
    "percent": "%", "thinspace": "", "enspace": " ", "ast": r"\cdot", "bf": "", "rm": "",
}  # fmt: skip
TEXT = ("text", "mathrm", "textrm", "mbox", "textbf", "textit", "mathit", "mathbf", "textnormal", "mathsf", "textsf")
COMMAND = re.compile(r"\\([A-Za-z]+)[ \t]*")
TEXT_COMMAND = re.compile(r"\\(?:" + "|".join(TEXT) + r")\s*\{")
ROOT = re.compile(r"√\s*(\d+|\{)?")
SPACES = re.compile(r"(?<!\\)\\[,;:! ]|~|\\hspace\{[^{}]*\}")
WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))


def normalized(text: str) -> str:
    r"""The one spelling; `\text{…}` stays, under that name, since it may hold a unit or a word.

    Example: `$\dfrac12\,\mathrm{cm}$.` is `\frac{1}{2} \text{cm}`.
    """
    text = _unwrapped(text.strip())
    for character, spelling in PLAIN.items():
        text = text.replace(character, spelling)
    text = ROOT.sub(
        lambda match: rf"\sqrt{{{match[1]}}}" if match[1] and match[1] != "{" else r"\sqrt" + (match[1] or ""), text
    )
    text = text.replace("{,}", ",").replace(r"\$", "$").replace(r"\%", "%").replace(r"\&", "&").replace(r"\_", "_")
    text = text.replace(r"\!", "").replace(r"\,", " ")
    text = SPACES.sub(" ", text)
    text = TEXT_COMMAND.sub(r"\\text{", text)
    text = COMMAND.sub(_command, text)
    text = re.sub(r"\\mathbb\s+([A-Z])", r"\\mathbb{\1}", text)
    text = re.sub(r"(?:\*\*|\^)\s*(\d{2,}|(?<=\*\*)\d)", r"^{\1}", text)  # plain text: 2^10 is 1024 and not 20
    text = re.sub(r"\^\s*\{\s*\\circ\s*\}", r"^\\circ", text)
    for name, count in (("frac", 2), ("binom", 2), ("sqrt", 1)):
        text = _braced(text, "\\" + name, count)
    text = re.sub(r"\\text\{([^{}A-Za-z]*)\}", r"\1", text)
    text = re.sub(r"_\{(\w)\}(?!\w)", r"_\1", text)
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"^(?:\\approx(?![A-Za-z])|=)", "", re.sub(r"(?:[.,;: ]|\\+$)+$", "", text))
    return _unwrapped(text.strip())


def compact(text: str) -> str:
    """Without spaces that say nothing: all but those between two words or two numbers."""
    return re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", text)


def unwrapped_text(text: str) -> str:
    r"""`\text{word}` as `word`, everywhere."""
    while True:
        place = text.find(r"\text{")
        if place < 0:
            return text.strip()
        end = closing(text, place + 5)
        if end is None:
            return text.strip()
        text = text[:place] + text[place + 6 : end] + text[end + 1 :]


def closing(text: str, start: int) -> int | None:
    """The place of the brace that closes the one at `start`."""
    depth, place = 0, start
    while place < len(text):
        if text[place] == "\\":
            place += 2
            continue
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return place
        place += 1
    return None


def _command(match: re.Match[str]) -> str:
    name = match[1]
    if name not in COMMANDS:
        return match[0]
    new = COMMANDS[name]
    return new + " " if new[-1:].isalpha() else new


def _unwrapped(text: str) -> str:
    for opening, end in WRAPPERS:
        inside = text[len(opening) : len(text) - len(end)]
        wrapped = len(text) > len(opening) + len(end) and text.startswith(opening) and text.endswith(end)
        if wrapped and opening not in inside and end not in inside:
            return _unwrapped(inside.strip())
    return text


def _braced(text: str, command: str, count: int) -> str:
    r"""`\frac12` as `\frac{1}{2}`: an argument without braces is one character or one command, as TeX reads it."""
    start = 0
    while True:
        place = text.find(command, start)
        if place < 0:
            return text
        start = place + len(command)
        if text[start : start + 1].isalpha():
            continue
        cursor = start
        if command == r"\sqrt" and text[cursor:].lstrip().startswith("["):
            end = text.find("]", cursor)
            cursor = end + 1 if end >= 0 else cursor
        for _ in range(count):
            text, cursor = _one_braced(text, cursor)


def _one_braced(text: str, cursor: int) -> tuple[str, int]:
    begin = cursor
    while begin < len(text) and text[begin] == " ":
        begin += 1
    if begin >= len(text):
        return text, cursor
    if text[begin] == "{":
        end = closing(text, begin)
        return text[:cursor] + text[begin:], cursor if end is None else cursor + end + 1 - begin
    token = re.compile(r"\\[A-Za-z]+|.", re.DOTALL).match(text, begin)
    assert token is not None
    if token[0] in "}])":
        return text, cursor
    argument = "{" + token[0] + "}"
    return text[:cursor] + argument + text[token.end() :], cursor + len(argument)
