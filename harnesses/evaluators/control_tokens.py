"""Keeps an agent's text from ending its place in a prompt by a model's control tokens (`<|im_end|>`).

A server that renders the chat template itself encodes such a literal as the token, whoever wrote it, and the rest of
the text is then another message. Nobody here knows the vocabulary of each server. So nothing that is written as control
tokens are stays in one piece: `DOT` follows its first character. Ordinary code has few such places; HTML's elements
and common types, which control no family of models, stay as they are.
"""

from __future__ import annotations

import re

DOT = "\u00b7"  # a middle dot: neither a letter of a name nor in any control token

_PLAIN = (
    "a|article|b|body|br|button|code|dd|div|dl|dt|em|footer|form|h[1-6]|head|header|hr|"
    "html|i|label|li|main|nav|ol|option|p|pre|script|section|select|small|span|strong|"
    "style|sub|sup|svg|table|tbody|td|textarea|tfoot|th|thead|title|tr|u|ul|template|"
    "fieldset|legend|details|summary|blockquote|[A-Z]|any|auto|bool|boolean|char|double|"
    "float|int|long|number|object|short|str|string|unsigned|void|Integer|Object|String|"
    "[fiu](?:8|16|32|64)|[iu]size"
)

BEGINNING = re.compile(
    rf"(?<=[<\uff1c\ufe64\u3008\u2329\u27e8])(?={DOT}*[|\uff5c\[])"  # <|im_end|>, <[end]>
    rf"|(?<=[<\uff1c\ufe64])(?={DOT}*[/\uff0f]?(?!(?:{_PLAIN})>)[\w:-]{{1,100}}[|\uff5c]?[>\uff1e\ufe65])"
    rf"|(?<=[\[\uff3b\ufe47])(?={DOT}*(?:[|\uff5c]|e~\[|[/\uff0f]?[a-z]?[^\W\da-z_]{{2}}\w{{0,100}}[\]\uff3d\ufe48]))"
    rf"|(?<=\])(?={DOT}*(?:<\]|[~!][a-z!~]))"  # ]<]image[>[ and ]~b] of MiniMax
    rf"|(?<=\uff5c)(?={DOT}*[A-Z]{{2,100}}\uff5c)"  # of DeepSeek
    rf"|(?<=>)(?={DOT}*>[A-Z]{{2,100}}<<)"  # >>QUESTION<< of Falcon
)
"""The place behind the first character of what may be a control token. Dots of the text's own stand in it, too, so that
there is one text only that becomes what is shown."""


def without_control_tokens(text: str) -> str:
    """`text` without control tokens of any model: `DOT` stands behind the first character of each."""
    return BEGINNING.sub(DOT, text)
