"""Pictures in prompts and examples: a small random Qwen3-VL behind the official SDK, and what a model of text alone says to them."""

import datetime
import hashlib
import hmac
import http.server
import json
import re
import struct
import subprocess
import threading
import zlib

import numpy as np
import pytest
import tinker
from tinker import types

from harness import API_KEY, Server, binary, encode, logprobs_of, same_bits, train

REFUSED = (tinker.RequestFailedError, tinker.APIStatusError)
GREEDY = dict(max_tokens=12, temperature=0.0, stop=[])
# Pixels along a side of what becomes one token.
TOKEN_SIDE = 16
VISION_START, IMAGE, VISION_END = 297, 298, 299
CONFIG = dict(
    model_type="qwen3_vl", image_token_id=IMAGE, vision_start_token_id=VISION_START, vision_end_token_id=VISION_END,
    tie_word_embeddings=False,
    text_config=dict(
        model_type="qwen3_vl_text", vocab_size=300, hidden_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=80, max_position_embeddings=512, initializer_range=0.2,
        eos_token_id=2, bos_token_id=0,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 2, 2], mrope_interleaved=True),
    ),
    vision_config=dict(
        model_type="qwen3_vl_vision", depth=3, hidden_size=32, intermediate_size=48, num_heads=2, in_channels=3, patch_size=8,
        temporal_patch_size=2, spatial_merge_size=2, out_hidden_size=48, num_position_embeddings=64,
        deepstack_visual_indexes=[0, 1], initializer_range=0.2,
    ),
)
PREPROCESSOR = dict(
    image_processor_type="Qwen2VLImageProcessorFast", patch_size=8, temporal_patch_size=2, merge_size=2,
    size=dict(shortest_edge=256, longest_edge=65536), image_mean=[0.5] * 3, image_std=[0.5] * 3,
)


def png(rows, columns, seed=0):
    """The file of random pixels, so many tokens high and wide."""
    height, width = rows * TOKEN_SIDE, columns * TOKEN_SIDE
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def picture(rows=2, columns=3, seed=0, **fields):
    return types.ImageChunk(**dict(data=png(rows, columns, seed), format="png", expected_tokens=rows * columns) | fields)


def prompt(*parts, marks=((VISION_START,), (VISION_END,))):
    """Pictures, pointers to them and texts, one after another, the pictures between their marks."""
    chunks = []
    for part in parts:
        if isinstance(part, str):
            chunks.append(types.EncodedTextChunk(tokens=encode(part)))
            continue
        before, after = (types.EncodedTextChunk(tokens=list(mark)) for mark in marks)
        chunks += [before, part, after]
    return types.ModelInput(chunks=chunks)


def example(*parts, **marks):
    """A cross-entropy example over the text in `parts`: what follows a picture's position is not learned."""
    targets = []
    for chunk in prompt(*parts, **marks).chunks:
        is_text = isinstance(chunk, types.EncodedTextChunk)
        targets += [(token, 1.0) for token in chunk.tokens] if is_text else [(0, 0.0)] * chunk.length
    targets = targets[1:] + [(0, 0.0)]
    return types.Datum(
        model_input=prompt(*parts, **marks),
        loss_fn_inputs={"target_tokens": [token for token, _ in targets], "weights": [weight for _, weight in targets]},
    )


def pointer(path, scheme="file://", **fields):
    return types.ImageAssetPointerChunk(**dict(format="png", location=f"{scheme}{path}", expected_tokens=6) | fields)


def sample(client, model_input, **params):
    return client.sample(model_input, 1, types.SamplingParams(**GREEDY | params)).result()


def scores(client, model_input):
    return client.compute_logprobs(model_input).result()


def works(client):
    """Whether what comes next is answered."""
    return len(sample(client, prompt("hello")).sequences[0].tokens) == GREEDY["max_tokens"]


@pytest.fixture(scope="module")
def album(tmp_path_factory):
    """A directory of pictures that prompts may name."""
    directory = tmp_path_factory.mktemp("album") / "pictures"
    directory.mkdir()
    (directory / "a.png").write_bytes(png(2, 3))
    (directory.parent / "secret.png").write_bytes(png(2, 3))
    (directory / "out.png").symlink_to("../secret.png")
    return directory


SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
AWS = dict(AWS_ACCESS_KEY_ID="AKIDEXAMPLE", AWS_SECRET_ACCESS_KEY=SECRET, AWS_REGION="eu-test-1")


def is_signed(request):
    """Whether a request has the signature that S3 would compute for it."""
    given = re.fullmatch(
        r"AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/(\d{8})/eu-test-1/s3/aws4_request, ?SignedHeaders=([^,]+), ?Signature=(\w+)",
        request.headers.get("Authorization", ""),
    )
    if not given:
        return False
    (date, names, signature), time = given.groups(), request.headers["x-amz-date"]
    age = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.strptime(time + "+0000", "%Y%m%dT%H%M%SZ%z")
    lines = "".join(f"{name}:{request.headers[name]}\n" for name in names.split(";"))
    asked = "\n".join(["GET", request.path, "", lines, names, request.headers["x-amz-content-sha256"]])
    scope = f"{date}/eu-test-1/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", time, scope, hashlib.sha256(asked.encode()).hexdigest()])
    key = f"AWS4{SECRET}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    is_right = hmac.digest(key, text.encode(), "sha256").hex() == signature
    return is_right and time.startswith(date) and "host" in names.split(";") and abs(age.total_seconds()) < 900


@pytest.fixture(scope="module")
def store():
    """A store of pictures: `/pictures/` for everybody, `/bucket/` for who signs as S3 wants it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked.append(self.path)
            path = self.path.partition("?")[0]
            if path == "/pictures/away.png":
                self.send_response(302)
                self.send_header("Location", "/secret.png")
                self.end_headers()
            elif path == "/pictures/broken.png":
                self.server.broken += 1
                self.answer(500 if self.server.broken == 1 else 200)
            elif path.startswith("/bucket/"):
                self.answer(200 if is_signed(self) else 403)
            else:
                self.answer(200 if path.endswith("a%20b.png") or path == "/secret.png" else 404)

        def answer(self, status):
            content = png(2, 3) if status == 200 else b"<Error/>"
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked, server.broken = [], 0
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory, album, store):
    """A server of a random model that sees."""
    directory = tmp_path_factory.mktemp("seeing")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    model = directory / "model"
    command = [binary(), "init-model", str(model), "--config", str(directory / "config.json"), "--dtype", "f32"]
    subprocess.run(command, check=True, capture_output=True)
    (model / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    stores = f"{store.url}/pictures/,s3://bucket/deep/"
    flags = ("--name", "org/seeing", "--tokenizer", "org/words", "--image-dir", str(album), "--image-store", stores)
    with Server(directory, str(model), *flags, env=AWS | {"AWS_ENDPOINT_URL": store.url}) as running:
        yield running


@pytest.fixture
def tenant(seeing):
    with tinker.ServiceClient(base_url=seeing.url, api_key=API_KEY) as service:
        yield service


@pytest.fixture
def adapter(tenant):
    return tenant.create_lora_training_client(base_model="org/seeing", rank=4, seed=1).result()


@pytest.fixture
def base(tenant):
    return tenant.create_sampling_client(base_model="org/seeing")


def test_a_model_of_text_refuses_pictures_and_goes_on(service, base_model, training):
    unmarked = dict(marks=((), ()))
    sampler = service.create_sampling_client(base_model=base_model)
    with pytest.raises(REFUSED, match="reads text alone"):
        sample(sampler, prompt("see ", picture(), **unmarked))
    assert works(sampler)
    with pytest.raises(REFUSED, match="reads text alone"):
        training.forward_backward([example("see ", picture(), " there", **unmarked)], "cross_entropy").result()
    assert np.isfinite(train(training, [example("see there")], steps=1)).all()


def test_a_pointer_without_leave_is_refused_with_what_to_do(service, base_model, album):
    sampler = service.create_sampling_client(base_model=base_model)
    for chunk, words in (
        (pointer(album / "a.png"), "--image-dir"),
        (pointer("example.com/a.png", scheme="https://"), '"https".*--image-store'),
        (pointer("bucket/a.png", scheme="s3://"), '"s3".*--image-store'),
    ):
        with pytest.raises(tinker.BadRequestError, match=words) as refused:
            sample(sampler, prompt("see ", chunk))
        assert "send the picture itself" in str(refused.value) and "image_asset_pointer" in str(refused.value)
    assert works(sampler)


@pytest.mark.parametrize(
    "location, words",
    [
        ("file://{album}/../secret.png", "has a .."),
        ("file://{album}/%2e%2e/secret.png", "encoding"),
        ("file://{album}/out.png", "through a link"),
        ("file://{album}/none.png", "not there"),
        ("file://{album}", "directory"),
        ("file://{above}/secret.png", "in no directory"),
        ("file://localhost{album}/a.png", "another machine"),
        ("/etc/passwd", "no scheme"),
    ],
)
def test_a_pointer_leads_nowhere_but_into_its_directory(base, album, location, words):
    chunk = pointer(location.format(album=album, above=album.parent), scheme="")
    with pytest.raises(tinker.BadRequestError, match=words):
        sample(base, prompt("see ", chunk))
    assert works(base)


def test_a_pointer_is_the_picture_that_it_points_to(base, album):
    sent, pointed = (prompt("see ", chunk, " there") for chunk in (picture(), pointer(album / "a.png")))
    assert same_bits(scores(base, sent)[1:], scores(base, pointed)[1:])


@pytest.mark.parametrize("location", ["{store}/pictures/a%20b.png?signed=1", "s3://bucket/deep/a b.png"])
def test_a_pointer_into_a_store_is_the_picture_that_it_points_to(base, store, location):
    chunk = pointer(location.format(store=store.url), scheme="")
    sent, pointed = (prompt("see ", chunk, " there") for chunk in (picture(), chunk))
    assert same_bits(scores(base, sent)[1:], scores(base, pointed)[1:])


@pytest.mark.parametrize(
    "location, words, is_asked",
    [
        ("{store}/pictures/none.png", "404", True),
        ("{store}/pictures/away.png", "302.*no redirect", True),
        ("{store}/secret.png", "in no store", False),
        ("{store}/pictures/../secret.png", r"\.\.", False),
        ("{store}/pictures/%2e%2e/secret.png", r"\.\.", False),
        ("http://localhost/pictures/a%20b.png", "in no store", False),
        ("http://user@127.0.0.1/pictures/a%20b.png", "name or key before its host", False),
        ("s3://bucket/a b.png", "in no store", False),
        ("s3://other/deep/a b.png", "in no store", False),
        ("gs://bucket/deep/a b.png", "in no store", False),
    ],
)
def test_a_pointer_leads_nowhere_but_below_the_prefix_of_its_store(base, store, location, words, is_asked):
    asked = len(store.asked)
    with pytest.raises(tinker.BadRequestError, match=words):
        sample(base, prompt("see ", pointer(location.format(store=store.url), scheme="")))
    assert len(store.asked) == asked + is_asked
    assert works(base)


def test_a_store_that_fails_once_is_asked_again_by_the_sdk(base, store):
    chunk = pointer(f"{store.url}/pictures/broken.png", scheme="")
    assert len(sample(base, prompt("see ", chunk)).sequences[0].tokens) == GREEDY["max_tokens"]
    assert store.broken == 2


def test_tokens_are_named_and_drawn_at_the_positions_of_pictures_too(base):
    asked = prompt("look at ", picture(), "this one here, and then at it again")
    ids = [token for chunk in asked.chunks for token in (chunk.tokens if isinstance(chunk, types.EncodedTextChunk) else [5] * chunk.length)]
    seen = [position for position, logprob in enumerate(scores(base, asked)) if logprob is None][1:]
    assert len(seen) == 6, "the picture alone has no scores"

    def score(targets):
        params = types.SamplingParams(**GREEDY | dict(temperature=1.0, seed=3))
        return base.sample(asked, 1, params, include_prompt_logprobs=True, target_prompt_logprobs=targets, prompt_alt_tokens_k=2).result()

    response = score(types.TensorData.from_numpy(np.asarray(ids[1:])[:, None]))
    found = response.target_prompt_logprobs.to_numpy()[:, 0]
    others = [position for position in range(1, len(ids)) if position not in seen]
    assert same_bits(found[np.asarray(others) - 1], [response.prompt_logprobs[position] for position in others])
    assert (found < 0).all() and np.isfinite(found).all()
    drawn = response.prompt_alt_tokens
    assert drawn.tokens.shape == [len(ids) - 1, 2]
    assert same_bits(score(drawn.tokens).target_prompt_logprobs.to_numpy(), drawn.logprobs.to_numpy())
    with pytest.raises(REFUSED, match=f"a prompt of {len(ids)} tokens needs {len(ids) - 1} rows"):
        score(types.TensorData.from_numpy(np.asarray(ids[7:])[:, None]))


def test_a_prompt_with_a_picture_that_fills_the_context_is_scored(base, seeing):
    rest = tinker.RestClient(base_url=seeing.url, api_key=API_KEY)
    (context,) = {model.max_context_length for model in rest.get_server_capabilities().result().supported_models}
    # Six tokens of the picture, and its marks.
    words = (encode("a word and another, ") * context)[: context - 8 + 1]

    def asked(count):
        return types.ModelInput(chunks=[*prompt(picture()).chunks, types.EncodedTextChunk(tokens=words[:count])])

    full, shorter = (scores(base, asked(len(words) - less)) for less in (1, 2))
    assert len(full) == context and None not in full[8:]
    assert same_bits(full[8:-1], shorter[8:])
    assert len(sample(base, asked(len(words) - 1)).sequences[0].tokens) == 1
    with pytest.raises(REFUSED, match=f"{context + 1} tokens"):
        scores(base, asked(len(words)))


def test_an_adapter_learns_from_pictures_and_is_sampled_with_them(adapter):
    data = [example("see ", picture(seed=1), " a cat"), example(picture(3, 2, seed=2), picture(1, 1, seed=3), "two dogs")]
    losses = train(adapter, data, steps=6, learning_rate=1e-2)
    assert losses[-1] < losses[0] * 0.9, losses
    sampler = adapter.save_weights_and_get_sampling_client()
    seen = prompt("see ", picture(seed=1), " a")
    (sequence,) = sample(sampler, seen).sequences
    assert len(sequence.tokens) == GREEDY["max_tokens"]
    whole = types.ModelInput(chunks=seen.chunks + [types.EncodedTextChunk(tokens=sequence.tokens)])
    assert same_bits(scores(sampler, whole)[-len(sequence.tokens) :], sequence.logprobs)


def test_a_wrong_number_of_expected_tokens_is_refused_with_both(base, adapter):
    for refused in (
        lambda: sample(base, prompt("see ", picture(expected_tokens=7))),
        lambda: adapter.forward([example("see ", picture(expected_tokens=7), " it")], "cross_entropy").result(),
    ):
        with pytest.raises(REFUSED, match=r"(?s)\b7\b.*\b6\b|\b6\b.*\b7\b"):
            refused()
    assert works(base)


def test_what_is_no_picture_is_refused(base):
    for data in (b"GIF89a" + bytes(100), png(2, 3)[:-40], b"\xff\xd8\xff" + bytes(100)):
        with pytest.raises(REFUSED):
            sample(base, prompt("see ", picture(data=data)))
    assert works(base)


def test_a_prompt_with_a_picture_is_found_again(base):
    # Longer than a page of the cache.
    seen = prompt("see ", picture(8, 8, seed=4), " and tell what this is")
    first, second = sample(base, seen), sample(base, seen)
    assert first.sequences[0].tokens == second.sequences[0].tokens
    assert same_bits(first.sequences[0].logprobs, second.sequences[0].logprobs)
    assert second.prompt_cache_hit_tokens > 0


def test_another_picture_of_the_same_size_is_not_mistaken_for_the_first(base):
    def seen(seed):
        return prompt("see ", picture(8, 8, seed=seed), " and tell what this is")

    first, other, again = (scores(base, seen(seed)) for seed in (5, 6, 5))
    assert len(first) == len(encode("see ")) + 66 + len(encode(" and tell what this is"))
    after = -len(encode(" and tell what this is"))
    assert same_bits(first[1:], again[1:])
    assert not np.isclose(first[after:], other[after:], atol=1e-4).all()
    sample(base, seen(5))
    assert sample(base, seen(7)).prompt_cache_hit_tokens == 0


def test_a_batch_of_pictures_and_texts_of_two_tenants_is_each_alone(seeing, adapter):
    with tinker.ServiceClient(base_url=seeing.url, api_key=API_KEY) as other_service:
        other = other_service.create_lora_training_client(base_model="org/seeing", rank=6, seed=2).result()
        work = [
            (adapter, example("see ", picture(seed=8), " a cat")),
            (other, example("only text, and more of it")),
            (other, example(picture(3, 1, seed=9), "dogs ", picture(seed=8), "cats")),
            (adapter, example("text")),
        ]
        for client in (adapter, other):
            # So that adapters differ in what they compute.
            train(client, [datum for owner, datum in work if owner is client], steps=1)
        alone = [logprobs_of(client.forward([datum], "cross_entropy").result()) for client, datum in work]
        futures = [
            (client, client.forward([datum for owner, datum in work if owner is client], "cross_entropy"))
            for client in (adapter, other)
        ]
        for client, future in futures:
            output = future.result()
            expected = [bits for (owner, _), bits in zip(work, alone, strict=True) if owner is client]
            for i, bits in enumerate(expected):
                assert same_bits(logprobs_of(output, i), bits)
