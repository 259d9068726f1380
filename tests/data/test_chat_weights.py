"""A message of the assistant with weight 0 is read and not trained on. A token that reaches into an
answer is trained, and another template makes other tokens.
"""

import json
from pathlib import Path

import pytest

from tests.data.test_chat import CHAT, PLAIN, folder, trained_text
from tests.messages import refused
from titanlite.data.chat import ChatTokenizer

MARKED = PLAIN.replace(
    "m.content + '<|im_end|>\n'",
    "'' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n'",
)


def weighted(first, last):
    """Return the chat with keys added to its two messages of the assistant."""
    chat = [dict(message) for message in CHAT]
    chat[1] |= first
    chat[3] |= last
    return chat


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("off", [{"weight": 0}, {"train": False}], ids=str)
def test_a_message_of_weight_0_is_read_and_not_trained_on(tmp_path, template, off):
    assets = folder(tmp_path, template)
    (whole,) = trained_text(assets, CHAT)
    (first,) = trained_text(assets, weighted({}, off))
    (last,) = trained_text(assets, weighted(off, {"weight": 1}))
    plain = whole.replace("[", "").replace("]", "")
    for text, trained, other in ((first, "how", "fine"), (last, "fine", "how")):
        assert text.replace("[", "").replace("]", "") == plain
        inside = "".join(piece.partition("]")[0] for piece in text.split("[")[1:])
        assert trained in inside and other not in inside


def test_other_weights_and_chats_without_a_trained_message_are_refused(tmp_path):
    tokenizer = ChatTokenizer(folder(tmp_path, PLAIN))
    with refused("weight", "0.5", "0 and 1"):
        tokenizer.texts(weighted({"weight": 0.5}, {}))
    with refused("weight 0"):
        tokenizer.texts(weighted({"weight": 0}, {"train": False}))


def test_a_token_that_begins_before_the_answer_and_reaches_into_it_is_trained(tmp_path):
    """The space of the header and the answer's first letter are one token."""
    spaced = PLAIN.replace("\n' + m.content", " ' + m.content").replace("assistant\n", "assistant ")
    spaced = spaced.replace("m.role + '\n'", "m.role + ' '")
    assets = Path(folder(tmp_path, spaced))
    file = assets / "tokenizer.json"
    content = json.loads(file.read_text())
    merged = len(content["model"]["vocab"])
    content["model"]["vocab"]["Ġh"] = merged
    for token in content["added_tokens"]:
        token["id"] += 1
    content["model"]["merges"] = [["Ġ", "h"]]
    content["pre_tokenizer"]["trim_offsets"] = False  # or the space would not count
    file.write_text(json.dumps(content))
    tokenizer = ChatTokenizer(str(assets))
    (ids,) = tokenizer.encode_batch(tokenizer.texts(CHAT[:2]))
    assert merged in ids.tolist()  # not with READ_ONLY


def test_another_template_is_another_tokenizer(tmp_path):
    one, other = (
        ChatTokenizer(folder(tmp_path / name, template)).fingerprint
        for name, template in (("a", PLAIN), ("b", PLAIN.replace("im_end", "end")))
    )
    assert one != other
