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
SEGMENT = 128  # tokens of a part that has an embedding of its own


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

    def draw(self, length, generator):
        """Draws a run of sentences of one document, with planted ones of others.

        Returns:
            Token ids of the document, the indices of its sentences in their order, the
            number of tokens of each, and the indices of sentences to compare.
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
        run, _ = plant(own, planted, generator, size=lambda x: len(x[1]))
        indices, tokens = zip(*run, strict=True)
        counts = np.array([len(x) for x in tokens])
        return np.concatenate(tokens), list(indices), counts, [*ids, *chosen]

    def whole(self, length, generator):
        """Draws a document for the loss of whole documents, `loss`.

        Returns:
            Token ids, and embeddings `(1 + COMPARED, dim)`: the mean over the
            document's sentences, then some of these.
        """
        ids, indices, counts, compared = self.draw(length, generator)
        mean = normalized(counts @ self.embeddings[indices])
        return ids, np.concatenate([mean[None], self.embeddings[compared]])

    def in_parts(self, length, generator):
        """Draws a document for the loss of its parts, `loss_of_parts`.

        Returns:
            Token ids, and embeddings `(parts, dim)`: the mean over the sentences of
            each part, weighted by their tokens in it.
        """
        ids, indices, counts, _ = self.draw(length, generator)
        owner = np.repeat(indices, counts)
        # The mark of the start belongs to the first part, that of the end to the last.
        owner = np.concatenate([owner[:1], owner, owner[-1:]])
        parts = self.embeddings[owner].reshape(-1, SEGMENT, self.embeddings.shape[1])
        return ids, normalized(parts.mean(1))

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


def late_chunks(model, documents, tokenizer, size=SEGMENT):
    """Returns unit embeddings of parts of documents that a model read whole.

    This is late chunking (Günther et al., 2024): the model reads a document in one
    pass, and the mean is taken over every `size` tokens of the output.

    Returns:
        A list with an array `(parts, dim)` for each document, and an array
        `(documents, dim)` with the means over all tokens.
    """
    parts, whole = [], []
    for document in documents:
        inputs = rows([document], tokenizer)
        output = model.backbone.predict_on_batch(inputs)["sequence_output"]
        output = ops.convert_to_numpy(output)[0, : len(document) + 2]
        starts = np.arange(0, max(1, len(output) - size // 2), size)
        sums = np.add.reduceat(output, starts)
        parts.append(normalized(sums))
        whole.append(normalized(sums.sum(0)))
    return parts, np.stack(whole)


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


def loss_of_parts(others, weight):
    """Returns the loss of the embeddings of parts `(batch, parts, dim)`.

    Each is compared with the mean over its sentences, those of all other parts of the
    batch, and `others`. The arguments are those of `loss`.
    """

    def function(wanted, found):
        width = ops.shape(wanted)[-1]
        found, wanted = (
            ops.reshape(ops.cast(x, "float32"), (-1, width)) for x in (found, wanted)
        )
        logits = ops.matmul(found, ops.transpose(wanted)) / TEMPERATURE
        foreign = ops.matmul(found, ops.transpose(others)) / TEMPERATURE
        likeness = ops.sum(found * wanted, axis=-1)
        own = likeness / TEMPERATURE
        every = ops.concatenate([logits, foreign], axis=1)
        which_target = ops.mean(ops.logsumexp(every, axis=1) - own)
        which_part = ops.mean(ops.logsumexp(logits, axis=0) - own)
        return which_target + which_part + weight * (1 - ops.mean(likeness))

    return function


def parts_model(embedder):
    """Returns a model to the unit embeddings of parts, of a `TextEmbedder`.

    Documents have no padding, and a multiple of `SEGMENT` tokens.
    """
    output = embedder.backbone.output["sequence_output"]
    parts = keras.layers.Reshape((-1, SEGMENT, output.shape[-1]))(output)
    parts = ops.normalize(ops.mean(parts, axis=2), axis=-1)
    return keras.Model(embedder.backbone.input, parts)


def train(
    embedder, bank, tokenizer, steps, tokens, lengths, rate, seed, in_parts=False,
    weight=5.0,
):  # fmt: skip
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
        in_parts: Whether embeddings of parts train, instead of those of documents.
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
    model, function, draw = embedder, loss, bank.whole
    if in_parts:
        model, function = parts_model(embedder), loss_of_parts
        draw = bank.in_parts
    model.compile(optimizer, function(others, weight))
    losses = []
    for step in range(steps):
        length = lengths[step % len(lengths)]
        some = [draw(length, generator) for _ in range(max(2, tokens // length))]
        documents, wanted = zip(*some, strict=True)
        inputs = rows(documents, tokenizer, length)
        losses.append(float(model.train_on_batch(inputs, np.stack(wanted))))
        if step % 12 == 11:
            print(f"  {step + 1} steps: loss {np.mean(losses[-12:]):.3f}", flush=True)
    return losses
