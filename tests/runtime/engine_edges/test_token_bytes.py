"""A token's own bytes: all tokens of a text together are the text's bytes, also where one is half a character."""

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from oracles.tiny_models import write_tiny_tokenizer
from stageline_runtime.engine.text.token_bytes import TokenBytes
from stageline_runtime.engine.text.tokenizer import EngineTokenizer


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=30))
def test_byte_level_tokens_add_up_to_the_text(text: str, tmp_path: Path) -> None:
    if not (tmp_path / "tokenizer.json").exists():
        write_tiny_tokenizer(tmp_path)
    tokenizer = EngineTokenizer.load(tmp_path)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes.of(index) for index in ids) == text.encode()


def test_control_tokens_give_their_name_and_unknown_ids_nothing(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    token_bytes = EngineTokenizer.load(tmp_path).token_bytes
    assert token_bytes.of(2) == b"<|im_end|>"
    assert token_bytes.of(100_000) == b""


def test_sentencepiece_spellings() -> None:
    vocab = {"<unk>": 0, "\u2581Hi": 1, "<0x0A>": 2, "<0xC3>": 3, "x": 4}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    token_bytes = TokenBytes(backend)
    assert [token_bytes.of(index) for index in range(1, 6)] == [b" Hi", b"\n", b"\xc3", b"x", b"</s>"]


def test_without_a_known_convention_a_token_is_decoded_by_itself() -> None:
    backend = Tokenizer(models.WordLevel(vocab={"[UNK]": 0, "word": 1}, unk_token="[UNK]"))
    assert TokenBytes(backend).of(1) == b"word"
