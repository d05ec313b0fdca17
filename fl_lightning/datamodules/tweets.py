"""A tokenizer for tweets: mentions, links, hashtags, emoticons and elongated words.

Each regular expression is applied to a whole block of tweets, so that Python does not loop over tweets.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

from torch import Tensor

#: Increase this whenever the tokens of some tweet change, to invalidate caches.
VERSION = 1
EMPTY = "<empty>"
_LINK = re.compile(r"(?:https?://|www\.|\b(?:bit\.ly|is\.gd|tinyurl\.com|twitpic\.com)/)\S+", re.IGNORECASE)
_MENTION = re.compile(r"(?<!\w)@\w+")
_HASHTAG = re.compile(r"(?<!\w)#(?=\w*[^\W\d])")
_NUMBER = re.compile(r"(?<![\w.<:=])(?<!</)[+-]?\d+(?:[.,:]\d+)*(?:am|pm|st|nd|rd|th)?(?!\w)")
_ELONGATED = re.compile(r"([^\W\d_])\1{2,}")
_SHOUTED = re.compile(r"([!?])\1+")
_DOTS = re.compile(r"\.{2,}|\N{HORIZONTAL ELLIPSIS}")
_NOSE = re.compile(r"(?<=[:;=])[-o^'](?=[)(\]\[DPp/\\|*])")
_EMOTICON = r"[<>]?[:;=][')(\]\[DPpOo/\\|*3@]+|[xX]D+(?!\w)|</?3+|\^_*\^|[oO]_[oO]|-_+-|\(:|\):"
_WORD = r"[^\W_]+(?:['\N{RIGHT SINGLE QUOTATION MARK}_-][^\W_]+)*"
_TOKEN = re.compile(rf"\n|<(?:url|user|hashtag|number|empty)>|(?:(?<!\w){_EMOTICON})|{_WORD}|!!|\?\?|\.\.\.|_+|[^\w\s]")


def tokenize_block(tweets: Iterable[str]) -> list[str]:
    r"""Tokenize many tweets into one list, with a line feed after every tweet.

    Example:
        >>> tokenize_block(["@ann I'm sooooo happy!!! :-) http://x.co/y", "&lt;3 #monday 24"])
        ['<user>', "i'm", 'soo', 'happy', '!!', ':)', '<url>', '\n', '<3', '<hashtag>', 'monday', '<number>', '\n']
    """
    plain = (html.unescape(tweet) if "&" in tweet else tweet for tweet in tweets)
    text = "\n".join([" ".join(tweet.split()) or EMPTY for tweet in plain])
    text = _LINK.sub(" <url> ", text)
    text = _MENTION.sub(" <user> ", text)
    text = _HASHTAG.sub(" <hashtag> ", text)
    text = _NUMBER.sub(" <number> ", text)
    text = _NOSE.sub("", text)
    text = _ELONGATED.sub(r"\1\1", text)
    text = _SHOUTED.sub(r"\1\1 ", text)
    text = _DOTS.sub(" ... ", text)
    return [*map(_CASE.__getitem__, _TOKEN.findall(text)), *(["\n"] if text else [])]


def tokenize(tweet: str) -> list[str]:
    """Tokenize one tweet; a tweet without tokens has the token ``<empty>``."""
    return tokenize_block([tweet])[:-1]


def mask(tokens: Tensor) -> Tensor:
    """Return True for tokens and False for padding (token 0), with the same shape.

    Example:
        >>> import torch
        >>> mask(torch.tensor([[5, 2, 0, 0]])).tolist()
        [[True, True, False, False]]
    """
    return tokens != 0


class _Case(dict[str, str]):
    """Lowercases words, but not emoticons; caches every distinct token."""

    def __missing__(self, token: str) -> str:
        plain = self[token] = token if _FACE.fullmatch(token) else token.lower()
        return plain


_FACE = re.compile(_EMOTICON)
_CASE = _Case()
