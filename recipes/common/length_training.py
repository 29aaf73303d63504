"""Trains an embedder on long documents without labels; not a recipe itself.

The checkpoint, which reads 512 tokens, is the teacher: it embeds every sentence of the
training texts once. A long document's embedding is trained to be

- near to the mean of its sentences' embeddings, weighted by their tokens,
- nearer to each of its sentences than sentences of other documents are, and
- nearer to each of its sentences than other documents are.

Some sentences are planted: they come from other documents, so that a document's topic
does not tell that it holds them.
"""

import keras
import numpy as np
from common.long_documents import plant, rows
from keras import ops

COMPARED, PLANTED = 16, 4  # sentences of a document that are compared, and are planted
SHORT = 96  # tokens of a sentence at most
NEGATIVES = 4096
TEMPERATURE = 0.05


class Bank:
    """The sentences of a corpus with the teacher's embeddings.

    Args:
        corpus: `long_documents.Corpus`.
        teacher: A `TextEmbedder`.
        tokenizer: Tokenizer of KerasHub.
        path: Optional file that keeps the embeddings for the next time.
    """

    def __init__(self, corpus, teacher, tokenizer, path=None):
        documents = [x.sentences for x in (*corpus.articles, *corpus.messages)]
        documents = [[s[:SHORT] for s in x] for x in documents if len(x) > COMPARED]
        self.sentences = [s for x in documents for s in x]
        self.ends = np.cumsum([len(x) for x in documents])
        if path is not None and path.exists():
            self.embeddings = np.load(path)
        else:
            self.embeddings = embed(teacher, self.sentences, tokenizer)
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                np.save(path, self.embeddings)
        if len(self.embeddings) != len(self.sentences):
            raise ValueError(
                f"{path} must hold embeddings of {len(self.sentences)} sentences. "
                f"Received: {len(self.embeddings)} of other texts. Remove the file."
            )

    def example(self, length, generator):
        """Draws a run of sentences of one document, with planted ones of others.

        Returns:
            Token ids of the document, and the teacher's embeddings of the document,
            `(1 + COMPARED, dim)`: the mean over its sentences, then some of these.
        """
        start = generator.integers(len(self.sentences))
        which = int(np.searchsorted(self.ends, start, side="right"))
        first = self.ends[which - 1] if which else 0
        chosen = generator.integers(0, len(self.sentences), PLANTED)
        # Planted sentences leave room for the document's own ones.
        planted = [(i, self.sentences[i][: length // PLANTED - 8]) for i in chosen]
        room = length - 2 - sum(len(x) for _, x in planted)
        own, place = [], start
        while room > 0:  # the document begins again after its end
            own.append((place, self.sentences[place][:room]))
            room -= len(own[-1][1])
            place = place + 1 if place + 1 < self.ends[which] else first
        ids = [own[j][0] for j in generator.integers(0, len(own), COMPARED - PLANTED)]
        run, _ = plant([x for _, x in own], [x for _, x in planted], generator)
        every, tokens = zip(*((i, len(x)) for i, x in own + planted), strict=True)
        mean = normalized(np.array(tokens) @ self.embeddings[list(every)])
        compared = self.embeddings[[*ids, *chosen]]
        return np.concatenate(run), np.concatenate([mean[None], compared])

    def negatives(self, generator):
        """Returns embeddings of sentences of any documents, `(NEGATIVES, dim)`."""
        return self.embeddings[generator.integers(0, len(self.sentences), NEGATIVES)]


def embed(model, documents, tokenizer, tokens=4096):
    """Returns unit embeddings of shape `(len(documents), dim)`, in their order.

    Documents of similar lengths share a batch of about `tokens` tokens.
    """
    order, found, some = np.argsort([len(x) for x in documents], kind="stable"), [], []
    for i in order:
        some.append(i)
        if i == order[-1] or len(some) * (len(documents[i]) + 2) >= tokens:
            inputs = rows([documents[j] for j in some], tokenizer)
            found.append(ops.convert_to_numpy(model.predict_on_batch(inputs)))
            some = []
    result = np.empty((len(documents), found[0].shape[-1]), "float32")
    result[order] = np.concatenate(found)
    return result


def normalized(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def loss(others, weight):
    """Returns the loss of documents' embeddings against the teacher's.

    Args:
        others: Unit embeddings of other documents' sentences, `(number, dim)`.
        weight: Weight of the cosine to the mean over sentences.
    """

    def function(wanted, found):
        found, wanted = ops.cast(found, "float32"), ops.cast(wanted, "float32")
        mean, sentences = wanted[:, 0], wanted[:, 1:]
        # Logits have the shape (sentence's document, sentence, document).
        logits = ops.einsum("bsd,cd->bsc", sentences, found) / TEMPERATURE
        batch = ops.shape(found)[0]
        own = ops.sum(logits * ops.eye(batch)[:, None], axis=-1)
        which_document = ops.mean(ops.logsumexp(logits, axis=-1) - own)
        foreign = ops.transpose(ops.matmul(others, ops.transpose(found)) / TEMPERATURE)
        foreign = ops.logsumexp(foreign, axis=-1, keepdims=True)
        which_sentence = ops.mean(ops.softplus(foreign - own))
        likeness = ops.mean(ops.sum(found * mean, axis=-1))
        return which_sentence + which_document + weight * (1 - likeness)

    return function


def train(embedder, bank, tokenizer, steps, tokens, lengths, rate, seed, weight=5.0):
    """Trains all weights of an embedder; returns the losses of its steps.

    Args:
        embedder: A `TextEmbedder` whose backbone takes the longest document.
        bank: `Bank` of the training texts.
        tokenizer: Tokenizer of KerasHub.
        steps: Number of steps.
        tokens: Number of tokens of a step; there are two documents at least.
        lengths: Lengths of documents, which take turns.
        rate: Highest learning rate; it rises for a tenth of the steps, then falls.
        seed: Seed of the documents.
        weight: Weight of the cosine to the mean over sentences.
    """
    generator = np.random.default_rng(seed)
    others = ops.convert_to_tensor(bank.negatives(generator))
    warmup = max(1, steps // 10)
    schedule = keras.optimizers.schedules.CosineDecay(
        rate / 100, max(1, steps - warmup), alpha=0.05, warmup_target=rate,
        warmup_steps=warmup,
    )  # fmt: skip
    for layer in embedder.backbone._flatten_layers():
        layer.trainable = True
    # KerasHub's BERT also computes an output of the first token, which is not used.
    embedder.backbone.get_layer("pooled_dense").trainable = False
    optimizer = keras.optimizers.Adam(schedule, clipnorm=1.0)
    embedder.compile(optimizer, loss(others, weight))
    losses = []
    for step in range(steps):
        length = lengths[step % len(lengths)]
        some = [
            bank.example(length, generator) for _ in range(max(2, tokens // length))
        ]
        documents, wanted = zip(*some, strict=True)
        inputs = rows(documents, tokenizer, length)
        losses.append(float(embedder.train_on_batch(inputs, np.stack(wanted))))
        if step % 12 == 11:
            print(f"  {step + 1} steps: loss {np.mean(losses[-12:]):.3f}", flush=True)
    return losses
