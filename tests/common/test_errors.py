from __future__ import annotations

import errno

from grpc import StatusCode
from surestep_common import errors
from surestep_common.errors import ERROR_TABLE, SurestepError, kind_of, kind_of_code, lack_of


def test_every_error_has_a_row_or_its_parents() -> None:
    rows = {kind.error for kind in ERROR_TABLE}
    named = [one for one in vars(errors).values() if isinstance(one, type)]
    for error in named:
        if issubclass(error, SurestepError) and error is not SurestepError:
            assert rows & set(error.__mro__), error
            assert kind_of(error("x")).error in error.__mro__


def test_errors_that_share_a_code_come_back_as_the_first_of_them() -> None:
    codes = [kind.code for kind in ERROR_TABLE]
    for kind in ERROR_TABLE:
        assert kind_of_code(kind.code) is ERROR_TABLE[codes.index(kind.code)]
    assert kind_of_code(StatusCode.DEADLINE_EXCEEDED).http_status == 504
    assert kind_of_code(StatusCode.INVALID_ARGUMENT).http_status == 400


def test_what_the_machine_lacks_is_told_as_what_comes_back() -> None:
    for error, words in (
        (MemoryError(), "out of memory"),
        (OSError(errno.EMFILE, "Too many open files"), "out of resources: Too many open files"),
    ):
        lack = lack_of(error)
        assert lack is not None
        assert words in lack.message
    assert lack_of(OSError(errno.EPIPE, "Broken pipe")) is None
    assert lack_of(ValueError()) is None


def test_an_error_repeats_little_of_what_was_sent() -> None:
    error = SurestepError("m" * 10_000, param="p" * 10_000)
    assert len(error.message) == len(str(error)) == 1000
    assert error.param is not None
    assert len(error.param) == 500
    short = SurestepError("m" * 1000, param="p" * 500)
    assert (short.message, short.param) == ("m" * 1000, "p" * 500)


def test_the_gateways_own_statuses() -> None:
    statuses = {
        errors.ClientTooSlow: 408,
        errors.UnsupportedMediaType: 415,
        errors.PermissionDenied: 403,
        errors.RequestTooLarge: 413,
    }
    assert {error: kind_of(error("x")).http_status for error in statuses} == statuses
