"""APIFuture on its own: results, errors and transformations, waited for in both ways."""

import asyncio
from concurrent.futures import Future

import pytest

from cookbook.core.clients import APIFuture
from cookbook.core.errors import BackendError


def pending():
    future: Future[int] = Future()
    return future, APIFuture(future)


def test_then_transforms_the_result_however_it_is_waited_for():
    source, future = pending()
    doubled = future.then(lambda value: value * 2)
    assert not doubled.done()
    source.set_result(21)
    assert doubled.result(1) == 42

    async def wait():
        return await doubled

    assert asyncio.run(wait()) == 42


def test_errors_of_the_operation_and_of_the_transformation_pass_through():
    source, future = pending()
    doubled = future.then(lambda value: value * 2)
    source.set_exception(BackendError("down"))
    with pytest.raises(BackendError, match="down"):
        doubled.result(1)

    source, future = pending()
    source.set_result(1)
    with pytest.raises(ZeroDivisionError):
        future.then(lambda value: value // 0).result(1)


def test_waiting_for_a_transformed_result_sets_off_the_lazy_work():
    source: Future[int] = Future()
    future = APIFuture(source, on_wait=lambda: source.set_result(1))
    assert future.then(lambda value: value + 1).result(1) == 2


def test_a_timeout_is_a_timeout():
    _, future = pending()
    with pytest.raises(TimeoutError):
        future.result(0.01)
