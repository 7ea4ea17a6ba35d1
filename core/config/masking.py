"""Hides secrets before anything is printed, logged or stored.

Invariant: what decides is the key's name or a URL's password, never the value's look; switches and numbers of
tokenizers (`use_cls_token`, `max_tokens`) stay readable.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

MASK = "********"
ALWAYS = {"password", "passwd", "pwd", "passphrase", "secret", "secrets", "apikey", "credential", "credentials", "jwt"}
KEY_KINDS = {"api", "access", "private", "secret", "ssh", "encryption", "signing", "account", "service"}
AUTH = {"auth", "access", "api", "bearer", "refresh", "hub", "hf", "github", "wandb", "session", "login", "mlflow"}
TOKENIZER = {
    *("cls", "pad", "eos", "bos", "unk", "sep", "mask", "stop", "start", "end", "special", "image", "video", "audio"),
    *("max", "min", "num", "per", "first", "last", "next", "begin", "think", "each", "new", "of", "add", "use"),
}
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
URL_PASSWORD = re.compile(r"(://[^\s:/?#@]*:)\S*@")
"""Up to the last @: a password may hold @ and / unescaped, and too much hidden is better than too little."""
URL_TOKEN = re.compile(r"(https?://)[^\s:/?#@]+@")
ASSIGNED = re.compile(r"(?<![\w.-])([\w.-]++)=([^&\s;,]+)")
"""Each name is tried once, from its first character, so that a text of a megabyte takes no hour."""


def mask(key: str, value: Any) -> Any:
    """`value`, or `********` where `key` names a secret; inside mappings, lists and URLs too.

    Example: `mask("hub_token", "hf_x")` is `********`; `mask("uri", "http://u:x@h:5000")` is `http://u:********@h:5000`;
    `mask("use_cls_token", True)` is True. A number under `token` is hidden, since a token may be all digits.
    """
    if isinstance(value, Mapping):
        if is_secret(key):
            return dict.fromkeys(value, MASK)
        return {inner: mask(str(inner), item) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(mask(key, item) for item in value)
    if value is None or isinstance(value, bool):
        return value
    if is_secret(key):
        return MASK
    return mask_text(value) if isinstance(value, str) else value


def mask_text(text: str) -> str:
    """A text without passwords in URLs and values of secret names (`password=…`)."""
    text = URL_PASSWORD.sub(rf"\1{MASK}@", text)
    text = URL_TOKEN.sub(rf"\1{MASK}@", text)
    return ASSIGNED.sub(lambda match: f"{match[1]}={MASK}" if is_secret(match[1]) else match[0], text)


def is_secret(key: str) -> bool:
    """Whether a part of a dotted key names a token, password, API key or the like."""
    return any(_names_secret(part) for part in key.split("."))


def _names_secret(name: str) -> bool:
    words = [word.lower() for word in WORD.findall(name)]
    if ALWAYS & set(words):
        return True
    pairs = set(pairwise(words))
    if any((kind, "key") in pairs or (kind, "keys") in pairs for kind in KEY_KINDS):
        return True
    if {"token", "tokens"} & set(words):
        others = set(words) - {"token", "tokens"}
        return bool(others & AUTH) or (words[-1] == "token" and not others & TOKENIZER)
    return words[-1:] in (["pass"], ["authorization"], ["cookie"])
