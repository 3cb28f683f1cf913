"""The protocol of an engine: the same methods on JAX and on TensorFlow, each with one line of contract.

`tests/test_engines.py` tests both. Outside this folder, only `processes.group` and `.store` import a backend.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import keras
import numpy as np
from keras.optimizers import Optimizer

from wholestep.embeddings.tables import TableRows
from wholestep.processes import Processes
from wholestep.state import State, Variables
from wholestep.tree import Tensor, Tree


class Watch(Protocol):
    """Reports accesses to variables before they happen."""

    def begin(self) -> None:
        """From now on accesses are reported, unless the watch has ended already."""

    def end(self) -> None:
        """No access is reported any more."""


class Engine(Protocol):
    """Runs one model and one optimizer on the devices of this process."""

    # ---- properties ----

    @property
    def name(self) -> str:
        """The name of the Keras backend."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer passed to `choose`; None for evaluation alone."""

    @property
    def processes(self) -> Processes:
        """The processes of the run, also if there is only one."""

    @property
    def waits(self) -> int:
        """The number of times that the host has waited for a device."""

    @property
    def compilations(self) -> int:
        """The number of programs that the engine has compiled."""

    @property
    def num_replicas(self) -> int:
        """The number of replicas that share the rows of a batch."""

    @property
    def own_replicas(self) -> list[int]:
        """The replicas whose rows this process loads; a single process loads all rows."""

    @property
    def is_split(self) -> bool:
        """True if each replica always sees its rows alone; else arrays are global, unless `total` splits them."""

    @property
    def can_split(self) -> bool:
        """True if several replicas may compute on their rows separately."""

    @property
    def coupling_layers(self) -> Collection[keras.layers.Layer]:
        """The layers in which the replicas of a split engine communicate where `total` syncs."""

    @property
    def always_xla(self) -> bool:
        """True if the user asked for XLA, and the engine could do without it."""

    @property
    def is_eager(self) -> bool:
        """True if nothing is traced or compiled: all functions are called with values, visible to the user."""

    @property
    def loops_once(self) -> bool:
        """True if a single update should be compiled as a loop as well."""

    @property
    def why_no_xla(self) -> str:
        """The reason why XLA compiles no more programs; "" if it does."""

    @why_no_xla.setter
    def why_no_xla(self, why: str) -> None:
        """Stop compiling programs by XLA for this reason, unless it is ""."""

    @property
    def sees_looks(self) -> bool:
        """True if `watch` reports the reads of a variable."""

    @property
    def freezes_reads(self) -> bool:
        """True if a variable that a function reads is a constant of the program."""

    @property
    def closes_over(self) -> bool:
        """True if the gradient of a separately traced function may use values of the enclosing program."""

    @property
    def keeps_assigned(self) -> bool:
        """True if an update starts from the value that the forward pass assigned to a parameter."""

    def for_evaluation(self) -> "Engine":
        """Return an engine for evaluation, with the same variables and never split."""

    def sharded(self, variables: list) -> list[str]:
        """Return the paths of the sharded variables, with the axes along which they are cut."""

    # ---- Keras variables and values ----

    def read_variables(self, variables: Variables) -> tuple[list, list, list]:
        """Return the values of params, slots and buffers, which may all be spent; [] for a group kept in variables."""

    def read_metrics(self, variables: Variables) -> list:
        """Return the values of the Keras metrics' variables, which may be spent."""

    def holds(self, variables: Variables, state: State) -> bool:
        """False only if a variable that the update changes holds a value that the next program would not use."""

    def at_rest(self, state: State) -> State:
        """Return the part of the state kept between programs, without the values that stay in their variables."""

    def loaded(self, state: State) -> State:
        """Return, in a program, the full state from the part kept between programs."""

    def stored(self, state: State) -> State:
        """Return, in a program, the part of the state to keep; write to variables the values that stay there."""

    def write_variables(self, variables: Variables, state: State) -> None:
        """Write a state that a program has stored to the Keras variables, without waiting."""

    def write_metrics(self, variables: Variables, metrics: list) -> None:
        """Write these values to the variables of the Keras metrics, without waiting."""

    def write_buffers(self, variables: Variables, buffers: list) -> None:
        """Write these values to the variables that are no parameters, without waiting."""

    def watch(self, variables: list, given: list, look: Callable[[], None], lock: AbstractContextManager) -> Watch:
        """Return a watch that calls `look` under the lock before an access to a variable or a write to `given`."""

    def copied(self, values: Tree) -> Tree:
        """Return copies of the values, without waiting."""

    def read_captured(self, variables: list, state: State) -> list:
        """Return the newest values of variables that no program reads itself; spending the state spares them."""

    def changed_outside(self, variables: list) -> list:
        """Return all variables, except those that certainly still hold the values of `write_variables`."""

    def params(self, state: State, apart: Collection[int] = ()) -> list:
        """Return the parameters after the last update; those `apart` need not be read as a whole."""

    # ---- between host and devices ----

    def place(self, data: Tree) -> Tree:
        """Return every leaf on the device, with the same numbers, nesting and Nones."""

    def resident(self, data: Tree) -> Tree:
        """Return data on the device, of which every replica can gather rows repeatedly."""

    def staged(self, data: Tree) -> Tree:
        """Return host arrays in the fastest form for a program, which gives the same results for placed arrays."""

    def shard(self, data: Tree, shares: np.ndarray) -> Tree:
        """Return data of which replica i holds the rows shares[i], int (replicas, rows of a replica)."""

    def fetch(self, values: Tree) -> Tree:
        """Return every leaf as numpy, after one wait; the host waits nowhere else."""

    def is_ready(self, values: Tree) -> bool:
        """True only if the values can be fetched without waiting for a device."""

    # ---- inside a program ----

    def traced(self, function: Callable) -> Callable:
        """Return a function with the same results; unless replicas are split, its Python runs once for each shape."""

    def inlined(self, function: Callable) -> Callable:
        """Return a function with the traced function's results, whose gradient may be taken anywhere."""

    def shapes(self, function: Callable, *arguments: Tree) -> Tree:
        """Return the shapes and dtypes of the function's results, without computing unless the engine is eager."""

    def frame(self) -> object:
        """Return the identity of the current trace, which is another one in the body of a loop."""

    def is_traced_in(self, frame: object, value: Tensor) -> bool:
        """True if the frame is being traced, and the value is not of one row under a vectorised map."""

    def is_kept(self, frame: object) -> bool:
        """True if a separately compiled function inside the frame keeps the current trace for other frames."""

    def tracing_anew(self) -> AbstractContextManager:
        """Return a context in which separately compiled functions are traced anew, unless the engine keeps traces."""

    def gather(self, data: Tree, rows: Tensor) -> Tree:
        """Return these rows of every leaf, in this order; row numbers are in range."""

    def lookup(self, table: Tensor, places: Tensor) -> Tensor:
        """Return the table's rows at these places; NaN for a place beyond the last."""

    def batch(self, data: Tree, rows: Tensor) -> Tree:
        """Return these rows, and to a replica its equal part; for `Shares`, `rows` index the shares."""

    def replica_slice(self, rows: Tensor) -> Tensor:
        """Return a replica's slice of a vector over the rows; outside of replicas, the full vector."""

    def replica_start(self, size: int) -> Tensor | int:
        """Return the index of the first row of a replica's part of `size` rows; 0 outside of replicas."""

    def replica_params(self, params: list) -> list:
        """Return a replica's values of the parameters; unchanged outside of replicas."""

    def total(
        self, function: Callable, data: Tree, carried: Tree, given: Tree, *, split: bool, syncs: bool
    ) -> tuple[Tree, Tree, Tree]:
        """Run (data, carried, given) -> (sums, carried, alike), if split on each replica; add up sums and changes."""

    def differentiate(self, function: Callable, params: list) -> tuple[list, Tree]:
        """Return dense gradients of params -> (scalar, auxiliary), zero for unused params, and the auxiliary."""

    def fold(self, function: Callable, carry: Tree, pieces: Tree, num: int) -> Tree:
        """Fold (carry, piece) -> carry over the pieces, (num, ...), in order."""

    def repeat(self, function: Callable, num: Tensor, state: State, reports: Tree) -> tuple[State, Tree]:
        """Call (i, state) -> (state, report) for i < num until a state is stopped; other reports are unchanged."""

    # ---- random draws ----

    @property
    def shuffles_slices(self) -> bool:
        """True if `keras.random.shuffle` moves whole slices; else it shuffles each vector along the axis separately."""

    def words(self, seed: Tensor, stream: Tensor | int, first: Tensor | int, num_rows: int, num_words: int) -> Tensor:
        """Return the uint32 words of places first + i, equal on every engine; another `num_words` gives other words."""

    def gamma_slope(self, alpha: Tensor, sample: Tensor) -> Tensor:
        """Return the derivatives of gamma samples by their parameter, for constant random words."""

    # ---- the optimizer ----

    def loss_scale(self, state: State) -> Tensor:
        """Return the factor by which the optimizer scales a loss now; 1 if it scales none."""

    def apply(self, state: State, new: State, grads: list, ok: Tensor, assigned: dict[int, Tensor]) -> State:
        """Return `new` after Keras' update of params and slots where `ok`, else `state`."""

    def apply_to_rows(
        self,
        state: State,
        new: State,
        grads: list,
        ok: Tensor,
        assigned: dict[int, Tensor],
        touched: list[TableRows],
        twin: Optimizer,
    ) -> State:
        """Return the result of `apply` on whole tables, where the twin updates only the `touched` rows of tables."""

    def is_finite(self, values: list) -> Tensor:
        """True if every number is finite, also if there are none."""

    # ---- a model's own steps ----

    def call_step(
        self,
        step: Callable,
        groups: Sequence[list],
        values: Sequence[list],
        num: int,
        data: Tree,
        note: Callable[[keras.Variable], None],
    ) -> tuple[Tree, list[list]]:
        """Call a step with `num` groups of values; return results and all groups after it. Other reads go to `note`."""

    def trying(self, variables: Variables) -> AbstractContextManager:
        """Return a context that undoes a step's changes of these variables, where `shapes` calls it."""

    def attempt(
        self, function: Callable[[State], tuple[State, Tensor, Tree]], state: State, variables: Variables
    ) -> tuple[State, Tensor, Tree]:
        """Return the results of (state) -> (state, is_good, results); unless good, restore state and variables."""

    # ---- programs ----

    def compile(self, function: Callable, examples: tuple, *, spends: bool = True, repeats: bool = False) -> Callable:
        """Return a program with the function's results for such arguments; the first is lost only if it `spends`."""

    def again(self, program: Callable) -> Callable | None:
        """Return the program in a form that is never retraced; None if it has side effects, or is never run again."""

    def describe(self, program: Callable) -> str:
        """Return how the program is executed, as text; "" if there is one way."""

    def memory(self, program: Callable) -> int | None:
        """Return the bytes that a program needs in addition to arguments and results; None if unknown."""

    def device_bytes(self) -> int | None:
        """Return the bytes of the device's memory; None where it is the host's."""

    def loops_slowly(self, function: Callable, *arguments: Tree) -> bool:
        """True only if the function is known to be slower inside a compiled loop, or nothing is compiled."""
