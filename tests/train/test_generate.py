"""What is drawn from a model: after its last tokens, at a temperature, by the prompt, until a
document ends.
"""

import torch
from torch import nn

from titanlite.config.schema import Generate
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.parallel.context_parallel import TokenShare
from titanlite.train.forward import WholeModel
from titanlite.train.generate import generate

POSITIONS = 8


def drawn(logits: torch.Tensor, seed: int = 0, **settings: object) -> tuple[str, list[str]]:
    """Return the text of a model that has these logits for each last token, and what it saw before
    each draw.
    """
    model, seen = nn.Embedding.from_pretrained(logits), list[str]()
    model.register_forward_pre_hook(
        lambda _, inputs: seen.append(bytes(inputs[0][0].tolist()).decode("latin1"))
    )
    asked = Generate.model_validate({"tokens": 9, "prompt": "a", **settings})
    runner = WholeModel(model, TokenShare(torch.device("cpu")))
    return generate(runner, ByteTokenizer(), asked, POSITIONS, seed), seen


def chain(text: str) -> torch.Tensor:
    """Return logits that prefer, after each character of a text, the next one, and then the end of
    the document.
    """
    logits, tokens = torch.zeros(256, 256), [0, *text.encode()]
    for before, after in zip(tokens, [*tokens[1:], 0], strict=True):
        logits[before, after] = 1.0
    return logits


def test_a_text_ends_with_its_document_or_after_the_tokens_that_were_asked_for():
    assert drawn(chain("abc"), temperature=0.0)[0] == "abc"
    assert drawn(chain("abcdefghijklmnop"), temperature=0.0)[0] == "abcdefghij"


def test_the_model_sees_the_last_tokens_that_it_has_positions_for():
    _, seen = drawn(chain("abcdefghijklmnop"), temperature=0.0, prompt="abcdefg")
    assert seen[:4] == ["abcdefg", "abcdefgh", "bcdefghi", "cdefghij"]


def test_a_low_temperature_draws_the_likeliest_token_and_a_high_one_any():
    assert drawn(chain("abcde"), temperature=0.01)[0] == "abcde"
    assert drawn(chain("abcde"), temperature=100.0)[0] != "abcde"


def test_prompts_and_seeds_draw_different_random_numbers_and_the_same_prompt_the_same():
    texts = [
        drawn(torch.zeros(256, 256), temperature=1.0, prompt=prompt)[0][1:] for prompt in "aab"
    ]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0] != drawn(torch.zeros(256, 256), seed=1, temperature=1.0)[0][1:]
