"""Trains an embedder on long documents without labels; not a recipe itself.

The checkpoint, which reads 512 tokens, is the teacher: it embeds every sentence of the
training texts once. A long document's embedding is trained to be near to the mean of
its sentences' embeddings, weighted by their tokens; nearer to each of its sentences
than sentences of other documents are; and nearer to each of its sentences than other
documents are. Some sentences are planted: they come from other documents, so that a
document's topic does not tell that it holds them.
"""

import keras
import numpy as np
from common.long_documents import plant, rows
from keras import ops

COMPARED, PLANTED = 16, 4  # sentences of a document that are compared, and are planted
SHORT, SEGMENT = 96, 128  # tokens of a sentence at most, and of a part of a document
NEGATIVES, TEMPERATURE, WEIGHT = 4096, 0.05, 5.0


class Bank:
    """The sentences of a `Corpus` with the teacher's embeddings."""

    def __init__(self, corpus, teacher, tokenizer):
        documents = [x.sentences for x in (*corpus.articles, *corpus.messages)]
        documents = [[s[:SHORT] for s in x] for x in documents if len(x) > COMPARED]
        self.sentences = [s for x in documents for s in x]
        self.ends = np.cumsum([len(x) for x in documents])
        self.embeddings = embed(teacher, self.sentences, tokenizer)

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
        run, place = [], start
        while room > 0:  # the document begins again after its end
            run.append((place, self.sentences[place][:room]))
            room -= len(run[-1][1])
            place = place + 1 if place + 1 < self.ends[which] else first
        ids = [run[j][0] for j in generator.integers(0, len(run), COMPARED - PLANTED)]
        run, _ = plant(run, planted, generator, size=lambda x: len(x[1]))
        indices, tokens = zip(*run, strict=True)
        counts = np.array([len(x) for x in tokens])
        return np.concatenate(tokens), list(indices), counts, [*ids, *chosen]

    def whole(self, length, generator):
        """Draws a document, and embeddings of its mean and of sentences to compare."""
        ids, indices, counts, compared = self.draw(length, generator)
        mean = normalized(counts @ self.embeddings[indices])
        return ids, np.concatenate([mean[None], self.embeddings[compared]])

    def in_parts(self, length, generator):
        """Draws a document, and the mean over the sentences of each of its parts."""
        ids, indices, counts, _ = self.draw(length, generator)
        owner = np.repeat(indices, counts)
        # The mark of the start belongs to the first part, that of the end to the last.
        owner = np.concatenate([owner[:1], owner, owner[-1:]])
        parts = self.embeddings[owner].reshape(-1, SEGMENT, self.embeddings.shape[1])
        return ids, normalized(parts.mean(1))


def embed(model, documents, tokenizer, tokens=4096):
    """Returns unit embeddings `(documents, dim)`, in batches of about `tokens`."""
    order, parts, batch = np.argsort([len(x) for x in documents], kind="stable"), [], []
    for i in order:
        batch.append(i)
        if i == order[-1] or len(batch) * (len(documents[i]) + 2) >= tokens:
            inputs = rows([documents[j] for j in batch], tokenizer)
            parts.append(ops.convert_to_numpy(model.predict_on_batch(inputs)))
            batch = []
    result = np.empty((len(documents), parts[0].shape[-1]), "float32")
    result[order] = np.concatenate(parts)
    return result


def late_chunks(model, documents, tokenizer, size=SEGMENT):
    """Returns unit embeddings of documents' parts, and of documents, read whole.

    Late chunking (Günther et al., 2024): means over every `size` tokens of the output.
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


def loss(others):
    """Returns the loss of documents, with embeddings of other documents' sentences."""

    def function(wanted, found):
        found, wanted = ops.cast(found, "float32"), ops.cast(wanted, "float32")
        mean, sentences = wanted[:, 0], wanted[:, 1:]
        # Logits have the shape (sentence's document, sentence, document).
        logits = ops.einsum("bsd,cd->bsc", sentences, found) / TEMPERATURE
        own = ops.sum(logits * ops.eye(ops.shape(found)[0])[:, None], axis=-1)
        which_document = ops.mean(ops.logsumexp(logits, axis=-1) - own)
        foreign = ops.transpose(ops.matmul(others, ops.transpose(found)) / TEMPERATURE)
        foreign = ops.logsumexp(foreign, axis=-1, keepdims=True)
        which_sentence = ops.mean(ops.softplus(foreign - own))
        likeness = ops.mean(ops.sum(found * mean, axis=-1))
        return which_sentence + which_document + WEIGHT * (1 - likeness)

    return function


def loss_of_parts(others):
    """Returns the loss of parts `(batch, parts, dim)`, compared with all of a batch."""

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
        return which_target + which_part + WEIGHT * (1 - ops.mean(likeness))

    return function


def train(
    embedder, bank, tokenizer, steps, tokens, lengths, rate, seed, in_parts=False
):  # fmt: skip
    """Trains all weights of a `TextEmbedder`; returns the losses of its steps.

    `lengths` of documents take turns, and a step has `tokens` tokens. With `in_parts`,
    the embeddings of parts of `SEGMENT` tokens train, not those of documents.
    """
    generator = np.random.default_rng(seed)
    others = generator.integers(0, len(bank.sentences), NEGATIVES)
    others = ops.convert_to_tensor(bank.embeddings[others])
    warmup = max(1, steps // 10)
    schedule = keras.optimizers.schedules.CosineDecay(
        rate / 100, max(1, steps - warmup), alpha=0.05, warmup_target=rate,
        warmup_steps=warmup,
    )  # fmt: skip
    for layer in embedder.backbone._flatten_layers():
        layer.trainable = True
    # KerasHub's BERT also computes an output of the first token, which is not used.
    embedder.backbone.get_layer("pooled_dense").trainable = False
    model, function, draw = embedder, loss, bank.whole
    if in_parts:
        output = embedder.backbone.output["sequence_output"]
        parts = keras.layers.Reshape((-1, SEGMENT, output.shape[-1]))(output)
        parts = ops.normalize(ops.mean(parts, axis=2), axis=-1)
        model = keras.Model(embedder.backbone.input, parts)
        function, draw = loss_of_parts, bank.in_parts
    model.compile(keras.optimizers.Adam(schedule, clipnorm=1.0), function(others))
    losses = []
    for step in range(steps):
        length = lengths[step % len(lengths)]
        batch = [draw(length, generator) for _ in range(max(2, tokens // length))]
        documents, wanted = zip(*batch, strict=True)
        inputs = rows(documents, tokenizer, length)
        losses.append(float(model.train_on_batch(inputs, np.stack(wanted))))
    return losses
