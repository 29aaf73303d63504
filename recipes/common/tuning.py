"""Fine-tunes and scores a BERT on SST-2, MRPC or STS; not a recipe itself."""

import keras
import keras_hub
import numpy as np
from common.results import tell
from common.schedules import cosine
from common.sentences import preprocessor, split
from keras import ops
from scipy.stats import spearmanr

from keras_rfattn import diagnostics

# Maximum number of tokens of a text or pair; hardly any is longer.
TOKENS = {"sst2": 48, "mrpc": 96, "sts": 96}
BATCH, RATE = 32, 1e-4


class Task:
    """A data set for fine-tuning and evaluation.

    Args:
        data: Folder of all data sets.
        name: `"sst2"`, `"mrpc"` or `"sts"`.
        steps: Number of fine-tuning steps.
        stride: Only every n-th row is evaluated.
    """

    def __init__(self, data, name, steps, stride=1):
        self.name, self.steps, self.tokenizer = name, steps, None
        self.train = split(data, name, "train")
        parts = [split(data, name, part, stride) for part in ("dev", "test")]
        self.rows = parts[0] + parts[1]

    def preprocessor(self):
        return preprocessor(self.tokenizer, TOKENS[self.name])

    def columns(self, texts):
        """Returns a list of texts, or a tuple of two lists for pairs."""
        if self.name == "sst2":
            return texts
        return tuple(map(list, zip(*texts, strict=True)))

    def inputs(self, texts):
        # Without `y`, a tuple would be taken for inputs and labels.
        found = self.preprocessor()(self.columns(texts), y=None)
        return {k: ops.convert_to_numpy(x) for k, x in found.items()}

    def texts(self):
        """Returns the training texts without labels and without evaluation texts.

        Pairs are included in both orders, because the model sees these as two texts.
        """
        judged = {sentence for text, _ in self.rows for sentence in sentences(text)}
        found = [text for text, _ in self.train if not judged & {*sentences(text)}]
        if self.name == "sst2":
            return found
        found += [text[::-1] for text in found]
        return [np.array(x, object) for x in self.columns(found)]

    def fine_tuned(self, backbone, tokenizer, seed):
        """Returns a classifier or regressor after training the whole model."""
        keras.utils.set_random_seed(seed)
        self.tokenizer = tokenizer
        is_regression = self.name == "sts"
        model = keras_hub.models.BertTextClassifier(
            backbone, num_classes=1 if is_regression else 2
        )
        x = self.inputs([text for text, _ in self.train])
        y = np.array([y for _, y in self.train])
        generator = np.random.default_rng(seed)
        some = np.concatenate(
            [generator.choice(len(y), BATCH, replace=False) for _ in range(self.steps)]
        )
        x, y = {k: v[some] for k, v in x.items()}, y[some]
        rate = cosine(RATE, self.steps)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(rate), "mse" if is_regression else loss)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        return model

    def predictions(self, model):
        """Returns predictions, in batches of similar length to reduce padding."""
        inputs = self.inputs([text for text, _ in self.rows])
        lengths = inputs["padding_mask"].sum(-1)
        order, found = np.argsort(lengths, kind="stable"), {}
        for i in range(0, len(order), 64):
            rows = order[i : i + 64]
            longest = -(-lengths[rows].max() // 16) * 16
            some = {k: x[rows, :longest] for k, x in inputs.items()}
            found.update(zip(rows, model.predict_on_batch(some), strict=True))
        return np.stack([found[row] for row in range(len(order))])

    @staticmethod
    def judge(model, task):
        """Returns the score, as a metric for `keras_rfattn.diagnostics.attribute`."""
        return task.score(task.predictions(model))

    def score(self, predicted, chosen=slice(None)):
        """Returns the accuracy or rank correlation on the rows `chosen`."""
        wanted = np.array([y for _, y in self.rows])[chosen]
        if self.name == "sts":
            return float(spearmanr(wanted, predicted[chosen, 0])[0])
        return float(np.mean(predicted[chosen].argmax(-1) == wanted))

    def interval(self, ours, theirs, draws=2000):
        """Returns the 95 % interval of a score difference.

        It is a paired bootstrap over rows and seeds.
        """
        generator, found, count = np.random.default_rng(0), [], len(self.rows)
        for _ in range(draws):
            chosen = generator.integers(count, size=count)
            seeds = generator.integers(len(ours), size=len(ours))
            found.append(np.mean([
                self.score(ours[i], chosen) - self.score(theirs[i], chosen)
                for i in seeds
            ]))  # fmt: skip
        return np.quantile(found, [0.025, 0.975]).tolist()


def sentences(text):
    return [text] if isinstance(text, str) else text


def compare(args, arms):
    """Scores arms for every seed, and compares each with the arm "uptrained".

    Args:
        args: Parsed flags.
        arms: Generator function `(args, task, seed)` of pairs `(name, model)`, one of
            which is named "uptrained".
    """
    task = Task(args.data_dir, args.task, args.tune_steps, args.stride)
    predicted = {}
    for seed in args.seeds:
        for arm, model in arms(args, task, seed):
            predicted.setdefault(arm, []).append(task.predictions(model))
            row = {"task": args.task, "arm": arm, "seed": seed, "rows": len(task.rows)}
            row["score"] = task.score(predicted[arm][-1])
            if arm == "uptrained":
                row |= vars(diagnostics.attribute(model, task, Task.judge))
            tell(args, row)
    ours = predicted.pop("uptrained")
    for arm, theirs in sorted(predicted.items()):
        row = {"task": args.task, "uptrained minus": arm, "seeds": args.seeds}
        tell(args, row | {"95 %": task.interval(ours, theirs)})


def reinitialize(model, seed):
    """Draws new weights with a fresh model's spread; nothing learned remains."""
    generator = np.random.default_rng(seed)
    for weight in model.trainable_weights:
        if len(weight.shape) > 1 and "feature_map" not in weight.path:
            weight.assign(0.02 * generator.standard_normal(weight.shape))
        elif "gamma" not in weight.path and "feature_map" not in weight.path:
            weight.assign(0 * weight)
