"""Several processes of a run, played by threads of this one: what they tell each other goes by way of lists."""

import threading

from wholestep.processes.single import SingleProcess

WAIT = 20.0  # seconds for a thread that does not come


class Hall:
    """Where threads meet."""

    def __init__(self, count):
        self.count = count
        self.barrier = threading.Barrier(count)
        self.values = [None] * count
        self.asides, self.lock = {}, threading.Lock()

    def aside(self, name):
        with self.lock:
            return self.asides.setdefault(name, Hall(self.count))


class Seat(SingleProcess):
    """One of several processes."""

    def __init__(self, index, hall):
        self.index, self.count, self.hall = index, hall.count, hall

    def all_gather(self, value):
        self.hall.values[self.index] = value
        self.hall.barrier.wait(WAIT)
        values = list(self.hall.values)
        self.hall.barrier.wait(WAIT)
        return values

    def broadcast(self, value):
        return self.all_gather(value)[0]

    def aside(self, name):
        return Seat(self.index, self.hall.aside(name))


def played(count, work):
    """Return by process what `work(seat)` returned, or the error that it raised."""
    hall, found = Hall(count), [None] * count

    def play(index):
        try:
            found[index] = work(Seat(index, hall))
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=play, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT)
    assert not any(thread.is_alive() for thread in threads)
    return found
