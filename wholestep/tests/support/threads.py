"""Several processes of a run, played by threads of this one: their store is a dict."""

import threading

from wholestep.processes import SingleProcess
from wholestep.processes.store import StoreExchange

WAIT = 20.0  # seconds for a thread that does not come


class Shared:
    """State that all threads share: their messages, and a barrier."""

    def __init__(self, count):
        self.values, self.news = {}, threading.Condition()
        self.barrier = threading.Barrier(count)


class Store:
    """What one thread reads and writes there, as `wholestep.processes.store.KeyValueStore`."""

    def __init__(self, shared):
        self.shared = shared
        self.once = []

    def set(self, key, value):
        self.once.append(key)
        with self.shared.news:
            assert key not in self.shared.values
            self.shared.values[key] = value
            self.shared.news.notify_all()

    def get(self, key):
        with self.shared.news:
            assert self.shared.news.wait_for(lambda: key in self.shared.values, WAIT), (
                f"nobody tells {key}"
            )
            return self.shared.values[key]

    def delete(self, key):
        with self.shared.news:
            del self.shared.values[key]


class Seat(SingleProcess):
    """One of several processes."""

    def __init__(self, index, count, shared):
        self.index = index
        self.count = count
        self.shared = shared
        self.exchange = StoreExchange(index, count)
        self.exchange.store = Store(shared)
        self.all_gather = self.exchange.all_gather
        self.broadcast = self.exchange.broadcast

    def aside(self, name):
        exchange = StoreExchange(self.index, self.count, f"{name}/", self.exchange)
        exchange.store = Store(self.shared)
        return exchange


def played(count, work):
    """Return by process what `work(seat)` returned, or the error that it raised."""
    shared = Shared(count)
    found = [None] * count

    def play(index):
        try:
            found[index] = work(Seat(index, count, shared))
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=play, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT)
    assert not any(thread.is_alive() for thread in threads)
    return found
