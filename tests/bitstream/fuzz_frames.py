"""Fuzz target of the frame reader. Run from the folder `tests`:

    python -m bitstream.fuzz_frames --seconds 60 --seed 1 golden/v1 golden/bad
    python -m bitstream.fuzz_frames --atheris golden/v1 -- -max_total_time=600

The first form draws mutations of the corpus from a seed and needs nothing else. The second is coverage-guided: it hands
what follows `--` to libFuzzer and needs `pip install atheris`. Both write the input that broke the reader to
`crash-*` in the working folder and end with exit code 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import xxhash
from bitstream.mutations import mutated
from bitstream.reading import assert_same_outcome, decoded, plainly_decoded, watched_decoders
from bitstream.sample_frames import CODERS, GEOMETRY, expectation, frame, resealed

from sglang_kvtc.bitstream.frame import CHECKSUM_BYTES, read_header
from sglang_kvtc.bitstream.header import FrameExpectation, FrameKind, max_section_bytes
from sglang_kvtc.errors import BitstreamError

MAX_TOKENS = 256
SECTION_LIMIT = max_section_bytes(GEOMETRY, MAX_TOKENS)
BUILT_IN = tuple(frame(kind, tokens, coder=coder) for kind in FrameKind for tokens in (0, 1, 24) for coder in CODERS)


def fuzz_one(blob: bytes) -> None:
    """Read any bytes, as they are and under a checksum that fits. Raises what is a bug."""
    candidates = [blob, resealed(blob)] if len(blob) >= CHECKSUM_BYTES else [blob]
    with watched_decoders(SECTION_LIMIT):
        for candidate in candidates:
            wanted = _wanted(candidate)
            assert_same_outcome(decoded(candidate, wanted), plainly_decoded(candidate, wanted))


def fuzz(corpus: Sequence[bytes], seconds: float, seed: int) -> int:
    """Mutate the corpus until the time is over; returns the number of inputs read."""
    rng, end, count = random.Random(seed), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        _, blob = mutated(rng, corpus)
        try:
            fuzz_one(blob)
        except Exception:
            crash = Path(f"crash-{xxhash.xxh3_64_hexdigest(blob)}")
            crash.write_bytes(blob)
            sys.stderr.write(f"input {count} of seed {seed} broke the reader: {crash}\n")
            raise
        count += 1
    return count


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and fuzz."""
    parser = argparse.ArgumentParser(prog="python -m bitstream.fuzz_frames")
    parser.add_argument("corpus", nargs="*", type=Path, help="frames, or folders of them, beside a few built-in ones")
    parser.add_argument("--seconds", type=float, default=60, help="how long (default %(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations (default %(default)s)")
    parser.add_argument("--atheris", action="store_true", help="coverage-guided; arguments after -- go to libFuzzer")
    given = list(sys.argv[1:] if arguments is None else arguments)
    ours, theirs = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    args = parser.parse_args(ours)
    corpus = [*BUILT_IN, *_frames_of(args.corpus)]
    if args.atheris:
        _fuzz_with_atheris(corpus, theirs)
    else:
        count = fuzz(corpus, args.seconds, args.seed)
        sys.stderr.write(f"{count} inputs read, none broke the reader\n")


def _wanted(blob: bytes) -> FrameExpectation:
    """Expect what the header says, up to MAX_TOKENS, so that most inputs come as far as the decoders."""
    try:
        header = read_header(blob)
    except BitstreamError:
        return expectation(BUILT_IN[0])
    return FrameExpectation(
        header.geometry_digest,
        header.artifact_digest,
        (header.plan,),
        header.start_position,
        min(header.num_tokens, MAX_TOKENS),
        SECTION_LIMIT,
    )


def _frames_of(paths: Sequence[Path]) -> list[bytes]:
    """Whole frames only: mutations take them apart."""
    files = [file for path in paths for file in (sorted(path.glob("*.kvtc")) if path.is_dir() else [path])]
    return [blob for blob in (file.read_bytes() for file in files) if _is_whole(blob)]


def _is_whole(blob: bytes) -> bool:
    return not isinstance(plainly_decoded(blob, _wanted(blob)), str)


def _fuzz_with_atheris(corpus: Sequence[bytes], arguments: Sequence[str]) -> None:
    import atheris  # type: ignore[import-not-found]  # no dependency of this project

    def mutate(blob: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if _is_whole(blob) and rng.random() < 0.5:
            return mutated(rng, [blob])[1][:max_size]
        return bytes(atheris.Mutate(blob, max_size))

    atheris.instrument_all()
    with tempfile.TemporaryDirectory() as folder:
        for blob in corpus:
            Path(folder, xxhash.xxh3_64_hexdigest(blob)).write_bytes(blob)
        # What libFuzzer finds goes to its own folder, never into ours.
        atheris.Setup([sys.argv[0], *arguments, folder], fuzz_one, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
