"""The tweet tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.datamodules.tweets import tokenize, tokenize_block


@pytest.mark.parametrize(
    ("tweet", "tokens"),
    [
        ("@switchfoot hi @_ann_", ["<user>", "hi", "<user>"]),
        ("mail me@home.org", ["mail", "me", "@", "home", ".", "org"]),
        ("see http://twitpic.com/2y1zl - wow", ["see", "<url>", "-", "wow"]),
        ("WWW.Foo.com/a?b=c&amp;d bit.ly/x1", ["<url>", "<url>"]),
        ("#Monday is #1", ["<hashtag>", "monday", "is", "#", "<number>"]),
        (
            ":) :-) :( :'( ;D =] xD XDD <3 &lt;3 o_O ^_^",
            [":)", ":)", ":(", ":(", ";D", "=]", "xD", "XDD", "<3", "<3", "o_O", "^_^"],
        ),
        ("(: ):", ["(:", "):"]),
        ("great:)", ["great", ":", ")"]),
        ("sooooo coooool nooo good", ["soo", "cool", "noo", "good"]),
        ("YES!!!!! what??? !?", ["yes", "!!", "what", "??", "!", "?"]),
        ("wait...... no.. end.", ["wait", "...", "no", "...", "end", "."]),
        ("Don't can't rock'n'roll re-do", ["don't", "can't", "rock'n'roll", "re-do"]),
        ("6:31pm 3am 2nd 1,000.50 50% $20 2day", ["<number>"] * 4 + ["<number>", "%", "$", "<number>", "2day"]),
        ("&quot;hi&quot; &amp; bye", ['"', "hi", '"', "&", "bye"]),
        ("tab\tand\nline&#10;feed", ["tab", "and", "line", "feed"]),
        ("caf\xe9 \xdcBER", ["caf\xe9", "\xfcber"]),
        ("", ["<empty>"]),
        (" \t ", ["<empty>"]),
        ("___", ["___"]),
        ("<pad> <unk>", ["<", "pad", ">", "<", "unk", ">"]),
    ],
)
def test_tokens(tweet: str, tokens: list[str]) -> None:
    assert tokenize(tweet) == tokens


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.text(st.characters(max_codepoint=255), max_size=60), max_size=6))
def test_a_block_is_its_tweets_one_by_one(tweets: list[str]) -> None:
    expected = [token for tweet in tweets for token in [*tokenize(tweet), "\n"]]
    assert tokenize_block(tweets) == expected
    assert all(tokenize(tweet) for tweet in tweets)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(max_size=80))
def test_no_token_is_blank_or_a_special_of_the_vocabulary(tweet: str) -> None:
    tokens = tokenize(tweet)
    assert tokens
    assert not any(token.isspace() or token in ("", "<pad>", "<unk>") for token in tokens)
