"""Splits text into words and sentences, for rules that were published with a word tokenizer.

The published rules use NLTK's or spaCy's English tokenizer, which processes some 20 documents a second. Here a regular
expression finds words. A word is an ellipsis, a run of letters, digits and apostrophes, or any other single character.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

_WORD = re.compile(r"\.{2,}|\w+(?:['’]\w+)*|[^\w\s]")

SENTENCE_ENDS = frozenset(
    "!.?։؝؞؟۔܀܁܂߹࠷࠹࠽࠾।॥၊။።፧፨᙮᜵᜶។៕៖៚᠃᠉᥄᥅᪨᪩᪪᪫᭎᭏᭚᭛᭞᭟᭽᭾᭿᰻᰼᱾᱿․‼‽⁇⁈⁉⳹⳺⳻⸮⸼⹓⹔⹠⹡。꓿꘎꘏꛳꛷꡶꡷꣎꣏꤯꧈꧉꩝꩞꩟꫰꫱꯫︒︕︖﹒﹖﹗！．？｡"
    "𐩖𐩗𐽕𐽖𐽗𐽘𐽙𐾆𐾇𐾈𐾉𑁇𑁈𑂾𑂿𑃀𑃁𑅁𑅂𑅃𑇅𑇆𑇍𑇞𑇟𑈸𑈹𑈻𑈼𑊩𑏔𑏕𑑋𑑌𑗂𑗃𑗉𑗊𑗋𑗌𑗍𑗎𑗏𑗐𑗑𑗒𑗓𑗔𑗕𑗖𑗗𑙁𑙂𑜼𑜽𑜾𑥄𑥆𑩂𑩃𑪛𑪜𑱁𑱂𑻷𑻸𑽃𑽄𖩮𖩯𖫵𖬷𖬸𖭄𖵮𖵯𖺘𛲟𝪈"
)
"""The characters with Unicode's property Sentence_Terminal, and three Khmer ones."""

_CONTROL = "".join(map(chr, (*range(9), 11, 12, *range(13, 32), *range(127, 160))))
_OTHER_SYMBOLS = "—”％１〈、━【「」，】；“《„’∶´．（–？！：～«〉》）。…►»"
SYMBOLS = frozenset(string.punctuation + _OTHER_SYMBOLS + _CONTROL) | SENTENCE_ENDS
"""A word that consists only of these characters is a symbol: CCNet's punctuation, ASCII's, and control characters."""


def split_words(text: str) -> list[str]:
    """Returns the words and symbols of a text, in order."""
    return _WORD.findall(text)


def count_sentences(text: str) -> int:
    """Returns the number of sentences. As in spaCy's sentencizer, the first word after a sentence's end starts a new
    sentence.
    """
    sentences, ended = 0, True
    for word in split_words(text):
        if word in SENTENCE_ENDS:
            sentences, ended = max(sentences, 1), True
        elif ended and (sentences == 0 or not SYMBOLS.issuperset(word)):
            sentences, ended = sentences + 1, False
    return sentences


def repeated(elements: Sequence[str]) -> tuple[int, int]:
    """Returns how many elements equal an earlier element, and the number of characters in those elements."""
    seen: set[str] = set()
    count = chars = 0
    for element in elements:
        if element in seen:
            count, chars = count + 1, chars + len(element)
        else:
            seen.add(element)
    return count, chars
