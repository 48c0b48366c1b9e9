"""One worker for all tests of this folder. The first request trains all cases of as many ranks together."""

from collections.abc import Iterator

import pytest

from tests.ranks.harness import Case, Result, Trained, Trainer

# Seconds for a test, which may train the cases of all others: an hour for the 284 of eight ranks, on two cores.
TIMEOUT = 7200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give time to the tests of which the first trains all others' cases."""
    for item in items:
        if "trained" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(TIMEOUT))


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    with Trainer(tmp_path_factory.mktemp("ranks")) as trainer:
        yield trainer


@pytest.fixture
def trained(request: pytest.FixtureRequest, trainer: Trainer) -> Trained:
    """Return the result of a case, after training it and all other selected cases of as many ranks."""

    def result(case: Case) -> Result:
        chosen = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
        trainer.train([case, *(other for other in chosen if isinstance(other, Case) and other.world == case.world)])
        return trainer.result(case)

    return result
