"""Launches on NumPy arrays: results, faults with their fields, memory, options."""

import ctypes
import pickle

import numpy as np
import pytest

import ptx_emulator
from kernels import BULK, COUNTER, DOUBLE, EMPTY, NO_BARRIER, PLACES, RACE, SPIN, SUM_OF_POINTERS
from ptx_emulator import Device, Fault, TensorMap, explore, launch


def test_results_reach_the_arrays():
    x = np.arange(100, dtype=np.float32)
    y = np.zeros(100, np.float32)
    report = launch(DOUBLE, "k", grid=4, block=32, args=[x, y, 100])
    assert np.array_equal(y, 2 * x)
    assert report.ctas == 4 and report.schedules == ("fair",)
    assert report.counters["bytes"]["global_load"] == 400
    assert {buffer["name"] for buffer in report.buffers} == {"x", "y"}
    assert report.time is None and report.warnings == [] and report.hazards == []


def test_an_overrun_names_the_argument_and_the_place():
    x, y = np.ones(100, np.float32), np.zeros(100, np.float32)
    with pytest.raises(Fault) as caught:
        launch(DOUBLE, grid=4, block=32, args={"source": x, "target": y, "n": 101})
    fault = caught.value
    assert fault.kind == "out-of-bounds" and fault.entry == "k"
    assert "byte 400 of source of 400 bytes" in fault.message
    assert (fault.cta, fault.warp, fault.lane) == ((3, 0, 0), 0, 4)
    assert fault.place.instruction == "ld.global.f32" and fault.line == fault.place.line
    assert len(fault.addresses) == 1 and fault.file is None
    assert "remedy" in str(fault) and fault.remedy


def test_views_share_the_memory_of_their_base():
    whole = np.arange(64, dtype=np.float32)
    out = np.zeros(32, np.float32)
    # The kernel reads past the view, but inside the base.
    launch(DOUBLE, grid=1, block=32, args=[whole[8:16], out, 32])
    assert np.array_equal(out, 2 * whole[8:40])
    # Both arguments lie in one array.
    launch(DOUBLE, grid=1, block=8, args=[whole[:8], whole[32:], 8])
    assert np.array_equal(whole[32:40], 2 * whole[:8])


def test_reversed_and_strided_views_pass_their_first_element():
    whole = np.arange(32, dtype=np.float32)
    out = np.zeros(1, np.float32)
    launch(DOUBLE, args=[whole[::-1], out, 1])
    assert out[0] == 62


def test_a_race_names_both_parties():
    with pytest.raises(Fault) as caught:
        launch(RACE, grid=2, block=32, args=[np.zeros(1, np.uint32)])
    fault = caught.value
    assert fault.kind == "data-race" and len(fault.others) == 1
    assert "CTA" in fault.others[0].what and fault.others[0].place.line == fault.place.line
    copy = pickle.loads(pickle.dumps(fault))
    assert (copy.kind, copy.others, str(copy)) == (fault.kind, fault.others, str(fault))


def test_allowed_hazards_do_not_end_the_launch():
    out = np.zeros(1, np.uint32)
    launch(RACE, grid=2, block=32, args=[out], allow="data-race")
    report = launch(RACE, grid=2, block=32, args=[out], keep_going=True)
    assert [hazard.kind for hazard in report.hazards] == ["data-race"] and report.hazards[0].times >= 1
    assert launch(RACE, grid=2, block=32, args=[out], level="machine").hazards == []


def test_every_schedule_runs_and_the_first_gives_the_results():
    out = np.zeros(64, np.uint32)
    report = launch(NO_BARRIER, block=64, args=[out], level="machine", schedules=5)
    assert report.schedules == ("fair", "worst", "seed:1", "seed:2", "seed:3")
    fair = np.zeros(64, np.uint32)
    launch(NO_BARRIER, block=64, args=[fair], level="machine")
    assert np.array_equal(out, fair)
    with pytest.raises(Fault) as caught:
        launch(NO_BARRIER, block=64, args=[out], schedule="worst")
    assert caught.value.schedule == "worst"


def test_lists_of_arrays_are_arrays_of_pointers():
    a, b, out = np.array([3], np.uint32), np.array([4], np.uint32), np.zeros(1, np.uint32)
    launch(SUM_OF_POINTERS, args=[[a, b], out])
    assert out[0] == 7
    with pytest.raises(Fault, match="pointers of list"):
        launch(SUM_OF_POINTERS, args=[[a], out])


def test_undefined_memory_is_found():
    out = np.zeros(32, np.float32)
    fresh = ptx_emulator.empty(32)
    with pytest.raises(Fault) as caught:
        launch(DOUBLE, block=32, args=[fresh, out, 32])
    assert caught.value.kind == "uninitialised-global"
    # An output may be undefined before the launch, and is defined after it.
    target = ptx_emulator.empty(32)
    launch(DOUBLE, block=32, args=[out, target, 32])
    launch(DOUBLE, block=32, args=[target, out, 32])


def test_a_device_keeps_memory_and_variables():
    device = Device("b200")
    data = device.upload(np.arange(4, dtype=np.float32), "data")
    target = device.empty(16, "target")
    device.launch(DOUBLE, block=4, args=[data, target, np.uint32(4)])
    assert np.array_equal(target.read(np.float32), [0, 2, 4, 6])
    calls = ptx_emulator.Module(COUNTER)
    out = np.zeros(1, np.uint32)
    assert [(device.launch(calls, args=[out]), int(out[0]))[1] for _ in range(3)] == [0, 1, 2]
    target.free()
    with pytest.raises(Fault, match="out-of-bounds"):
        device.launch(DOUBLE, block=4, args=[data, target.address, 4])
    fresh = device.empty(16)
    with pytest.raises(Fault, match="uninitialised-global"):
        device.launch(DOUBLE, block=4, args=[fresh, data, 4])


def test_tensor_maps_follow_the_arrays_order():
    tensor = np.arange(64 * 8, dtype=np.float32).reshape(8, 64)
    out = np.zeros(32, np.float32)
    launch(BULK, block=32, args=[TensorMap(tensor, box=(4, 8)), out])
    assert np.array_equal(out.reshape(4, 8), tensor[2:6, 4:12])


def test_arguments_are_checked():
    x = np.zeros(4, np.float32)
    with pytest.raises(TypeError, match=r"takes 3 arguments \(x, y, n\); 2"):
        launch(DOUBLE, args=[x, x])
    with pytest.raises(TypeError, match="n: float64 has 8 bytes, and the kernel's parameter has 4"):
        launch(DOUBLE, args=[x, x, np.float64(1)])
    with pytest.raises(OverflowError, match="n: 4294967296 does not fit"):
        launch(DOUBLE, args=[x, x, 1 << 32])
    with pytest.raises(TypeError, match="cannot pass str"):
        launch(DOUBLE, args=[x, x, "4"])
    with pytest.raises(ValueError, match="no entry 'z'; its entries are k"):
        launch(DOUBLE, "z", args=[x, x, 1])
    with pytest.raises(ValueError, match="read-only"):
        fixed = np.zeros(4, np.float32)
        fixed.flags.writeable = False
        launch(DOUBLE, block=4, args=[np.ones(4, np.float32), fixed, 4])
    launch(DOUBLE, args=[x, x.copy(), ctypes.c_uint32(1)])
    launch(DOUBLE, args=[x, x.copy(), b"\1\0\0\0"])
    launch(DOUBLE, args=[None, None, 0])


@pytest.mark.parametrize(
    "options, text",
    [
        ({"level": "hard"}, "level: `hard` is not a level"),
        ({"schedule": "random"}, "schedule: `random` is not a schedule"),
        ({"limit": "soon"}, "limit: `soon` is not a limit"),
        ({"allow": "deadlock"}, "allow: `deadlock` cannot be allowed"),
        ({"schedules": 0}, "schedules: 0; expected at least 1"),
        ({"grid": (1, 2, 3, 4)}, "grid: expected one to three sizes"),
        ({"gpu": "h1"}, "gpu: 'h1' is unknown; expected one of h200"),
    ],
)
def test_invalid_options_are_named(options, text):
    with pytest.raises(ValueError, match=text):
        launch(EMPTY, **options)


def test_invalid_ptx_and_launches_are_refused():
    with pytest.raises(ValueError, match="line"):
        launch(".version 8.0\n.target sm_80\nnonsense")
    with pytest.raises(ptx_emulator.BadLaunch, match="2048 threads"):
        launch(EMPTY, block=2048)


def test_kernels_that_wait_forever_end():
    with pytest.raises(Fault) as caught:
        launch(SPIN, args=[np.zeros(1, np.uint32)], limit="20s")
    assert caught.value.kind in ("no-progress", "instruction-budget")


def test_predicted_times_come_with_their_parts():
    x, y = np.zeros(1 << 12, np.float32), np.zeros(1 << 12, np.float32)
    report = launch(DOUBLE, grid=32, block=128, args=[x, y, 1 << 12], timed="h200")
    assert 0 < report.time.us < 1000 and "DRAM" in report.time.busy
    device = Device(timed="b200")
    first, second = (device.launch(DOUBLE, grid=32, block=128, args=[x, y, 1 << 12]).time.us for _ in range(2))
    assert first > 0 and second > 0
    slow = launch(DOUBLE, grid=32, block=128, args=[x, y, 1 << 12], timed="h200", constants={"clock": 100})
    assert slow.time.us > report.time.us


def test_arrays_of_other_libraries_are_memory():
    class Foreign:
        def __init__(self, array):
            self.array, self.__array_interface__ = array, array.__array_interface__

    x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
    launch(DOUBLE, block=4, args=[Foreign(x), Foreign(y), 4])
    assert y.sum() == 8


def test_search_through_all_orders_raises_a_fault_that_launch_replays():
    out = np.full(64, 5, np.uint32)
    with pytest.raises(Fault) as caught:
        explore(NO_BARRIER, block=64, args=[out])
    fault = caught.value
    assert fault.kind in ("data-race", "uninitialised-shared") and fault.schedule.startswith("order:")
    assert (out == 5).all(), "memory is as before the launch"
    with pytest.raises(Fault) as again:
        launch(NO_BARRIER, block=64, args=[out], schedule=fault.schedule)
    assert (again.value.kind, again.value.line) == (fault.kind, fault.line)
    assert str(fault.schedule) in str(fault)


def test_search_counts_the_results_of_all_orders():
    out, place = np.zeros(3, np.uint32), np.zeros(1, np.uint32)
    found = explore(PLACES, block=96, args=[out, place])
    # Three warps claim three places: 3! assignments, each in one order of the atomic additions.
    assert (found.whole, found.orders, found.results, found.failures) == (True, 6, 6, [])
    assert sorted(out) == [0, 32, 64] and place[0] == 3
    assert "explored whole: 6 orders" in str(found)


def test_bounds_end_a_search():
    arguments = [np.zeros(4, np.uint32), np.zeros(1, np.uint32)]
    found = explore(PLACES, block=128, args=arguments, orders=5)
    assert not found.whole and (found.end, found.orders) == ("orders", 5)
    found = explore(NO_BARRIER, block=64, args=[np.zeros(64, np.uint32)], every_fault=True)
    assert [fault.kind for fault in found.failures] and found.end in ("whole", "fault")


@pytest.mark.parametrize(
    "options, text",
    [
        ({"level": "machine"}, "hazards"),
        ({"seconds": -1.0}, "seconds"),
        ({"orders": 0}, "at least 1 order"),
        ({"preemptions": -1}, "0 preemptions"),
    ],
)
def test_searches_that_cannot_run_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        explore(DOUBLE, block=32, args=[np.zeros(1, np.float32), np.zeros(1, np.float32), 1], **options)


def test_order_that_is_none_is_refused():
    arguments = [np.zeros(1, np.float32), np.zeros(1, np.float32), 1]
    with pytest.raises(ValueError, match="schedule: `x` is no warp"):
        launch(DOUBLE, block=32, args=arguments, schedule="order:x")
    with pytest.raises(ptx_emulator.BadLaunch, match="cannot be made"):
        launch(DOUBLE, block=32, args=arguments, schedule="order:c0w7")
    with pytest.raises(ValueError, match="schedules"):
        launch(DOUBLE, block=32, args=arguments, schedule="order:c0w0", gpu="h200", timed=True)
