import pytest

from tests.mutants import MUTANTS, ROOT, mutated

pytestmark = pytest.mark.once


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_can_be_planted(name):
    mutant = MUTANTS[name]
    compile(mutated(mutant), mutant.file, "exec")
    file, _, test = mutant.tests.partition("::")
    assert f"def {test.partition('[')[0]}" in (ROOT / "tests" / file).read_text()


def test_a_mistake_that_is_not_there_is_an_error():
    mutant = MUTANTS["unsigned QR"]._replace(before="np.cos")
    with pytest.raises(ValueError, match="exactly once. Received: 0 times"):
        mutated(mutant)
