"""Vectors and scores equal an independent BERT's, depend on their own text alone, and fail with a reason."""
from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from bert_reference import Reference, toy_adapter, toy_model
from omegaconf import OmegaConf

from nexus.encoder import CrossEncoder, Encoder, EncoderError, utf8
from nexus.minilm import convert

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {
    "plain": "List open issues",
    "empty": "",
    "spaces": " \t\n ",
    "one letter": "a",
    "case": "LIST Open iSSueS",
    "query": "Which pull requests of this repository wait for my review, and since when do they wait?",
    "description": "create_or_change_file. Write one file to a repository. To change a file that is there, give its "
                   "SHA, the branch and a commit message; to create one, give its content only.",
    "camel case": "getPullRequestReviewComments listWorkflowRunArtifacts",
    "accents": "Café, naïve Ångström; Zürich fällt über Straße",
    "combining": "Cafe\u0301 nai\u0308ve",
    "capital I with a dot": "İstanbul",
    "Chinese": "列出所有未解决的问题 and merge 拉取请求",
    "Japanese": "リポジトリを作成する",
    "Cyrillic": "Создать новую ветку",
    "Greek": "Ένα νέο αποθετήριο ΣΟΦΟΣ",
    "Arabic": "إنشاء مستودع جديد",
    "emoji": "ship it 🚀🎉",
    "code": "def f(x: int) -> str:\n    return f\"{x!r:>10}\"  # ok?",
    "JSON": '{"owner": "octo-org", "repo": "x", "labels": ["bug", null], "page": 1e3}',
    "path": "https://example.org/a/b.c?d=e&f=%20#g ../../etc/passwd C:\\temp",
    "numbers": "3.14159 1,000,000 0xdeadbeef v2.53.1",
    "symbols": "a+b=c <d> $5 ^_^ `x` ~|~ €7 ©",
    "hyphens": "state-of-the-art — well–known don't",
    "literal special tokens": "[CLS] is not [SEP] and [MASK] [PAD] [UNK]",
    "zero width": "zero\u200bwidth\u00a0space\ufeff",
    "control": "bell\x07 and\x00nul",
    "unknown script": "𐎠𐎡𐎢 cuneiform",
    "exactly at the limit": "word " * 254,
    "one over": "word " * 255,
    "long": "open the repository and list every issue of it. " * 60,
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return toy_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def toy_gguf(toy: Path) -> Path:
    return convert(toy, toy / "toy.gguf")


@pytest.fixture(scope="module")
def encoder(toy_gguf: Path) -> Encoder:
    return Encoder(toy_gguf, max_tokens=64)


@pytest.fixture(scope="module")
def adapter(toy: Path) -> Path:
    return toy_adapter(toy / "adapter.safetensors", toy)


@pytest.fixture(scope="module")
def cross_gguf(toy: Path, adapter: Path) -> Path:
    return convert(toy, toy / "cross.gguf", adapter)


def test_vectors_equal_the_reference(toy: Path, encoder: Encoder):
    reference = Reference(toy)
    vectors = encoder.embed_documents(list(TEXTS.values()))
    assert vectors.dtype == np.float32 and vectors.shape == (len(TEXTS), encoder.dim) and encoder.dim == 32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    for vector, (name, text) in zip(vectors, TEXTS.items(), strict=True):
        assert vector @ reference.embed(text, 64) >= 0.999, name


def test_no_documents(encoder: Encoder):
    assert encoder.embed_documents([]).shape == (0, 32)


def test_a_vector_depends_on_its_own_text_alone(encoder: Encoder, toy_gguf: Path):
    texts = list(TEXTS.values())
    together = encoder.embed_documents(texts)
    np.testing.assert_array_equal(encoder.embed_documents(texts[::-1])[::-1], together)
    for text, vector in zip(texts, together, strict=True):
        np.testing.assert_array_equal(encoder.embed_query(text), vector)
    with Encoder(toy_gguf, max_tokens=64, n_threads=2) as two:
        # A few: on a busy machine two threads wait for each other.
        np.testing.assert_array_equal(two.embed_documents(texts[:8]), together[:8])


def test_results_are_the_callers_own(encoder: Encoder):
    first = encoder.embed_query("list")
    kept = first.copy()
    assert not np.array_equal(encoder.embed_query("open issue"), kept)
    np.testing.assert_array_equal(first, kept)


def test_prefixes_come_before_the_text(toy_gguf: Path, encoder: Encoder):
    with Encoder(toy_gguf, max_tokens=64, query_prefix="search_query: ", document_prefix="search_document: ") as other:
        np.testing.assert_array_equal(other.embed_query("list"), encoder.embed_query("search_query: list"))
        np.testing.assert_array_equal(other.embed_documents(["list"])[0], encoder.embed_query("search_document: list"))


def test_a_long_text_keeps_its_beginning_and_the_closing_token(encoder: Encoder):
    letters = "a b c d e f g h " * 20
    tokens = list(encoder.native.text_tokens(utf8(letters)))
    assert len(tokens) == 64 and (tokens[0], tokens[-1]) == (3, 4)
    np.testing.assert_array_equal(encoder.embed_query(letters), encoder.embed_query(" ".join(letters.split()[:62])))


def test_special_tokens_in_a_text_are_plain_text(encoder: Encoder):
    tokens = list(encoder.native.text_tokens(utf8("[SEP] a [CLS]")))
    assert tokens.count(3) == tokens.count(4) == 1


def test_lone_surrogates_are_dropped_and_pairs_joined(encoder: Encoder):
    np.testing.assert_array_equal(encoder.embed_query("list \ud800 open"), encoder.embed_query("list open"))
    assert utf8("\ud83d\ude80") == "🚀".encode()


def test_scores_equal_the_reference(toy: Path, adapter: Path, cross_gguf: Path):
    reference = Reference(toy, adapter)
    texts = list(TEXTS.values())
    with CrossEncoder(cross_gguf, max_tokens=64) as scorer:
        seen = []
        # Of the two, either may be the longer one, or both may be too long.
        for query in ("list open issues", "", "[SEP] a", TEXTS["long"], "a b c d e f g h i j " * 3):
            scores = scorer.score(query, texts)
            assert scores.dtype == np.float32
            expected = [reference.score(query, text, 64) for text in texts]
            np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-3)
            seen += expected
            np.testing.assert_array_equal(scorer.score(query, texts[::-1])[::-1], scores)
        # Scores that hardly differ would be equal by any rule.
        assert np.ptp(seen) > 0.1
        assert scorer.score("x", []).shape == (0,)


def test_a_pair_is_not_one_text(cross_gguf: Path):
    with CrossEncoder(cross_gguf, max_tokens=64) as scorer:
        assert list(scorer.native.pair_tokens(b"a [SEP]", b"b")).count(4) == 2
        assert scorer.score("a b", ["c"])[0] != scorer.score("a", ["b c"])[0]


@pytest.mark.parametrize("options, message", [
    ({"max_tokens": 65}, "max_tokens is 65; this model takes 5 to 64"),
    ({"max_tokens": 4}, "max_tokens is 4"),
    ({"n_threads": 0}, "n_threads is 0; give at least 1"),
])
def test_wrong_options_are_named(toy_gguf: Path, options: dict, message: str):
    with pytest.raises(EncoderError, match=message):
        Encoder(toy_gguf, **options)


def test_a_wrong_file_is_named(toy_gguf: Path, cross_gguf: Path, tmp_path: Path):
    with pytest.raises(EncoderError, match="absent.gguf is not a file"):
        Encoder(tmp_path / "absent.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(EncoderError, match="is not a GGUF file"):
        Encoder(tmp_path / "text.gguf")
    (tmp_path / "short.gguf").write_bytes(toy_gguf.read_bytes()[:2000])
    with pytest.raises(EncoderError, match="llama.cpp cannot load"):
        Encoder(tmp_path / "short.gguf")
    with pytest.raises(EncoderError, match="mean pooling, which is not for a cross-encoder"):
        CrossEncoder(toy_gguf, max_tokens=64)
    with pytest.raises(EncoderError, match="rank pooling, which is not for an embedder"):
        Encoder(cross_gguf, max_tokens=64)


def test_where_llama_cpp_reads_a_text_otherwise(toy: Path, encoder: Encoder):
    """Two differences that Encoder's documentation names: words over 100 letters, and spacing marks (नया)."""
    long_word = "a" * 101
    assert len(encoder.native.text_tokens(long_word.encode())) == 64  # the reference says [UNK]: 3 tokens
    reference = Reference(toy)
    assert list(encoder.native.text_tokens("a\u093e b".encode())) == [3, *reference.tokens("a b"), 4]
    assert reference.tokens("a\u093e b") != reference.tokens("a b")


def test_one_text_is_no_list_of_texts(encoder: Encoder, cross_gguf: Path):
    with pytest.raises(EncoderError, match="give a list of texts"):
        encoder.embed_documents("list")
    with CrossEncoder(cross_gguf, max_tokens=64) as scorer, pytest.raises(EncoderError, match="give a list of texts"):
        scorer.score("list", "open")


def test_a_closed_encoder_says_so(toy_gguf: Path):
    with Encoder(toy_gguf, max_tokens=64) as encoder:
        pass
    encoder.close()
    with pytest.raises(EncoderError, match="is closed; open it again"):
        encoder.embed_query("list")


def rotated(x: np.ndarray, base: float) -> np.ndarray:
    """RoPE of [heads, tokens, n]: element i is paired with i + n/2."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * base ** (-np.arange(half) / half)
    cos, sin, first, second = np.cos(angles), np.sin(angles), x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def test_an_encoder_with_rotary_positions(toy: Path, tmp_path: Path):
    """A toy of nomic-embed-text's form: RoPE, a gated feed-forward layer, no biases but the norms'."""
    reference, rng, hidden, inner, heads = Reference(toy), np.random.default_rng(3), 32, 64, 2
    n_vocab = len(reference.vocabulary)
    t = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in {
        "token_embd": (n_vocab, hidden), "token_types": (2, hidden), "blk.0.attn_qkv": (3 * hidden, hidden),
        "blk.0.attn_output": (hidden, hidden), "blk.0.ffn_gate": (inner, hidden), "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner)}.items()}
    norms = ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm")
    t |= {name: rng.normal(1, 0.1, hidden).astype(np.float32) for name in norms}
    writer = gguf.GGUFWriter(tmp_path / "nomic.gguf", "nomic-bert")
    for name, array in t.items():
        writer.add_tensor(f"{name}.weight", array)
        if name in norms:
            writer.add_tensor(f"{name}.bias", np.zeros(hidden, np.float32))
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_block_count(1)
    writer.add_head_count(heads)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_rope_freq_base(1000.0)
    writer.add_tokenizer_model("bert")
    writer.add_token_type_count(2)
    writer.add_token_list([token if token[0] == "[" and token[-1] == "]" else
                           token[2:] if token.startswith("##") else "\u2581" + token for token in reference.vocabulary])
    for kind, token in (("unk", "[UNK]"), ("bos", "[CLS]"), ("sep", "[SEP]"), ("pad", "[PAD]"), ("mask", "[MASK]")):
        getattr(writer, f"add_{kind}_token_id")(reference.vocabulary[token])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-12) * t[name]

    def embed(text: str) -> np.ndarray:
        ids = [3, *reference.tokens(text)[:62], 4]
        h = norm(t["token_embd"][ids] + t["token_types"][0], "token_embd_norm")
        q, k, v = np.split((h @ t["blk.0.attn_qkv"].T).reshape(len(ids), 3 * heads, -1).swapaxes(0, 1), 3)
        scores = rotated(q, 1000.0) @ rotated(k, 1000.0).swapaxes(1, 2) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(len(ids), -1)
        h = norm(h + mixed @ t["blk.0.attn_output"].T, "blk.0.attn_output_norm")
        gate = h @ t["blk.0.ffn_gate"].T
        h = h + (gate / (1 + np.exp(-gate)) * (h @ t["blk.0.ffn_up"].T)) @ t["blk.0.ffn_down"].T
        mean = norm(h, "blk.0.layer_output_norm").mean(0)
        return mean / np.linalg.norm(mean)

    prefix = "search_query: "
    with Encoder(tmp_path / "nomic.gguf", max_tokens=64, query_prefix=prefix) as encoder:
        for name, text in TEXTS.items():
            assert encoder.embed_query(text) @ embed(prefix + text) >= 0.9999, name


@pytest.fixture(scope="session")
def minilm() -> tuple[Path, Path]:
    """(published files, GGUF) of all-MiniLM-L6-v2."""
    from nexus.embedder import EmbedderSpec, ensure_embedder, ensure_source

    path = ROOT / "conf" / "embedder" / "minilm.yaml"
    spec = EmbedderSpec.model_validate(OmegaConf.to_container(OmegaConf.load(path)))
    return ensure_source(spec), ensure_embedder(spec).path


@pytest.mark.integration
def test_minilm_equals_the_reference(minilm: tuple[Path, Path]):
    source, gguf = minilm
    reference = Reference(source)
    with Encoder(gguf) as encoder:
        assert encoder.dim == 384
        for name, text in TEXTS.items():
            ours = encoder.embed_query(text)
            assert ours @ reference.embed(text, 256) >= 0.999, name
            tokens = list(encoder.native.text_tokens(utf8(text)))
            assert tokens[1:-1] == reference.tokens(text)[:254], name


@pytest.mark.integration
def test_minilm_with_a_toy_adapter_scores_as_the_reference(minilm: tuple[Path, Path], tmp_path: Path):
    source, _ = minilm
    adapter = toy_adapter(tmp_path / "toy.safetensors", source)
    reference = Reference(source, adapter)
    documents = [TEXTS[name] for name in ("plain", "empty", "description", "code", "Chinese", "long")]
    with CrossEncoder(convert(source, tmp_path / "toy.gguf", adapter)) as scorer:
        for query in ("list open issues", TEXTS["long"]):
            scores = scorer.score(query, documents)
            expected = [reference.score(query, document, 256) for document in documents]
            np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-3)
