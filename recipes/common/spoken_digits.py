"""Joins spoken digits to utterances, and scores them; not a recipe itself."""

import keras
import numpy as np
from keras import ops

NEW_VOICES = "theo", "yweweler"
SHORTEST, LONGEST = 3, 12  # digits per utterance
# There is a spectrum of 32 ms every 10 ms, and a token covers 4 of them.
MELS, FRAMES, STRIDE = 40, 512, 4
TOKENS = FRAMES // STRIDE


class SpokenDigits:
    """Log-mel spectrograms of digits, which are joined to utterances on the fly."""

    def __init__(self, path):
        with np.load(path) as file:
            self.digit, self.speaker = file["digit"], file["speaker"]
            self.index, lengths = file["index"], file["lengths"]
            ends, rate = np.cumsum(lengths), int(file["rate"])
            sound = file["samples"] / np.float32(2**15)
        samples = np.zeros((len(lengths), lengths.max()), "float32")
        for row, end, length in zip(samples, ends, lengths, strict=True):
            row[:length] = sound[end - length : end]
        hop = rate // 100
        mel = keras.layers.MelSpectrogram(
            256, hop, sampling_rate=rate, num_mel_bins=MELS, top_db=200.0
        )
        found = [ops.convert_to_numpy(mel(x)) for x in np.array_split(samples, 10)]
        found = zip(np.concatenate(found), 1 + lengths // hop, strict=True)
        self.features = [standardized(x[:, :count].T) for x, count in found]

    def of(self, part):
        """Returns the indices of the recordings of a part, one array per speaker."""
        known = ~np.isin(self.speaker, NEW_VOICES)
        chosen = {
            "train": known & (self.index >= 10),
            "new takes": known & (self.index < 5),
            "new voices": ~known,
        }[part]
        names = np.unique(self.speaker[chosen])
        return [np.flatnonzero(chosen & (self.speaker == name)) for name in names]

    def utterances(self, part, count, generator):
        """Returns `(inputs, targets)`; a target ends with its number of tokens."""
        speakers = self.of(part)
        features = np.zeros((count, FRAMES, MELS), "float32")
        real = np.zeros((count, TOKENS), bool)
        targets = np.zeros((count, LONGEST + 1), "int32")
        for i in range(count):
            numbers = speakers[generator.integers(len(speakers))]
            size = generator.integers(SHORTEST, LONGEST + 1)
            numbers = generator.choice(numbers, size)
            ends = np.cumsum([len(self.features[n]) for n in numbers])
            numbers = numbers[ends <= FRAMES]  # digits that fit
            joined = np.concatenate([self.features[n] for n in numbers])
            if part == "train":
                mask(joined, generator)
            features[i, : len(joined)] = joined
            tokens = -(-len(joined) // STRIDE)
            real[i, :tokens], targets[i, -1] = True, tokens
            targets[i, : len(numbers)] = 1 + self.digit[numbers]
        return {"features": features, "real": real}, targets


def standardized(x):
    """Normalizes each band, which removes the effect of a speaker's microphone."""
    return (x - x.mean(0)) / (x.std(0) + 1e-3)


def mask(x, generator):
    """SpecAugment (Park et al., 2019): bands of frequency and of time become 0."""
    low = generator.integers(MELS - 8)
    x[:, low : low + generator.integers(9)] = 0
    for start in generator.integers(len(x), size=len(x) // 100):
        x[start : start + generator.integers(21)] = 0


def ctc(targets, logits):
    """Computes the CTC loss, with digits from 1 on and 0 for the blank."""
    targets = ops.cast(targets, "int32")
    digits, tokens = targets[:, :-1], targets[:, -1]
    count = ops.sum(ops.cast(digits > 0, "int32"), -1)
    return ops.ctc_loss(digits, logits, count, tokens)


def error_rate(logits, targets):
    """Returns the edits divided by the number of digits, after greedy decoding."""
    found = ops.ctc_decode(logits, targets[:, -1])[0][0]
    pairs = zip(ops.convert_to_numpy(found), targets[:, :-1], strict=True)
    edits = sum(distance(a[a > 0], b[b > 0]) for a, b in pairs)
    return float(edits / np.sum(targets[:, :-1] > 0))


def distance(a, b):
    """Returns the Levenshtein distance: insertions, deletions and substitutions."""
    row = place = np.arange(len(b) + 1)
    for x in a:
        last, row = row, row + 1
        row[1:] = np.minimum(row[1:], last[:-1] + (b != x))
        # Insertions cost 1 for each position.
        row = np.minimum.accumulate(row - place) + place
    return int(row[-1])
