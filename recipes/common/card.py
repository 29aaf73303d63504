"""Saves a preset of an uptrained model with a model card; not a recipe itself."""

import pathlib

from common.results import command

CARD = """# {model}, linear attention

{mechanism}, uptrained with `keras_rfattn` from its softmax checkpoint.

    python recipes/{command}

The rank correlation on STS 2012 to 2016 is {as_it_is:.4f}, which is {share:.4f} times
the {softmax:.4f} of softmax. Controls: mean of V {mean_of_values:.4f}, zero attention
{no_attention:.4f}, window alone {window_only:.4f}, features alone {features_only:.4f}.

```
{report}
```
"""


def save(folder, model, report, row):
    """Saves the model with a model card.

    Args:
        folder: Folder of the preset.
        model: A KerasHub backbone.
        report: The `keras_rfattn.uptraining.UptrainingReport` of the model.
        row: Dict of results, including those of `keras_rfattn.diagnostics.attribute`.
    """
    model.save_to_preset(folder)
    card = CARD.format(
        model=type(model).__name__, mechanism=report.mechanism, report=report,
        command=command(),
        share=row["as_it_is"] / row["softmax"], **row,
    )  # fmt: skip
    (pathlib.Path(folder) / "README.md").write_text(card)
