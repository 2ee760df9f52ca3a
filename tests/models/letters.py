"""A tokenizer for tiny models."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torch_mpk.testing.tiny import VOCAB_SIZE


def letters(**kwargs: Any) -> PreTrainedTokenizerFast:
    """A token is a character."""
    words = Tokenizer(models.WordLevel({chr(33 + i): i for i in range(VOCAB_SIZE)}, unk_token="!"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="!", **kwargs)
