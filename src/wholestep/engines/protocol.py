"""What an engine promises: the same verbs on JAX and on TensorFlow, each with one line of contract.

`tests/test_engines.py` holds both to it. Beside this folder, only `processes.group` and `.store` import an engine.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import keras
import numpy as np
from keras.optimizers import Optimizer

from wholestep.embeddings.tables import TableRows
from wholestep.processes.protocol import Processes
from wholestep.state import State, Variables
from wholestep.tree import Tensor, Tree


class Watch(Protocol):
    """Reports accesses to variables before they happen."""

    def begin(self) -> None:
        """Accesses are reported from now on, unless the watch has ended already."""

    def end(self) -> None:
        """No access is reported any more."""


class Engine(Protocol):
    """One model's and one optimizer's way to the devices of this process."""

    # ---- what it is ----

    @property
    def name(self) -> str:
        """The name is that of the Keras backend."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer is the one that the engine was chosen for; who only evaluates needs none."""

    @property
    def processes(self) -> Processes:
        """The processes are those of the run, also if there is but one."""

    @property
    def waits(self) -> int:
        """The host has waited this many times for a device."""

    @property
    def compilations(self) -> int:
        """The engine has compiled this many programs."""

    @property
    def num_replicas(self) -> int:
        """So many replicas share the rows of a batch."""

    @property
    def own_replicas(self) -> list[int]:
        """The process loads the rows of these replicas; a single process loads those of all."""

    @property
    def is_split(self) -> bool:
        """True if replicas always work on their own rows alone; else arrays are global, unless `total` splits them."""

    @property
    def can_split(self) -> bool:
        """True if several replicas may work on their own rows alone."""

    @property
    def coupling_layers(self) -> Collection[keras.layers.Layer]:
        """Inside of these layers, the replicas of a split engine talk to each other where `total` syncs."""

    @property
    def always_xla(self) -> bool:
        """True if the user asked for XLA, and there is another way."""

    @property
    def is_eager(self) -> bool:
        """True if nothing is traced or compiled: all functions are called with values, as the user can see."""

    @property
    def loops_once(self) -> bool:
        """True if an update that is sent alone is best compiled as a loop too."""

    @property
    def why_no_xla(self) -> str:
        """The words say why XLA compiles no more programs, where there is another way; none if it does."""

    @why_no_xla.setter
    def why_no_xla(self, why: str) -> None:
        """XLA compiles no more programs, unless there are no words."""

    @property
    def sees_looks(self) -> bool:
        """True if `watch` can tell that somebody looks at a variable."""

    @property
    def freezes_reads(self) -> bool:
        """True if a variable that a function reads is a constant of the program."""

    @property
    def closes_over(self) -> bool:
        """True if the gradient of a function that is traced by itself may use values of the program around it."""

    @property
    def keeps_assigned(self) -> bool:
        """True if an update starts from what the forward pass assigned to a parameter."""

    def for_evaluation(self) -> "Engine":
        """The engine for evaluation has the same variables, and is never split."""

    def sharded(self, variables: list) -> list[str]:
        """Each variable that no device holds whole is named, with the axes along which it is cut."""

    # ---- Keras variables and values ----

    def read_variables(self, variables: Variables) -> tuple[list, list, list]:
        """The values of params, slots and buffers may all be spent; what stays in its variables is left out."""

    def read_metrics(self, variables: Variables) -> list:
        """The values of the Keras metrics' variables may be spent."""

    def holds(self, variables: Variables, state: State) -> bool:
        """False only if a variable that the update changes holds what the next program would not use."""

    def at_rest(self, state: State) -> State:
        """What is kept of the state from program to program; what stays in its variables is left out."""

    def loaded(self, state: State) -> State:
        """In a program, the state that was at rest, whole again."""

    def stored(self, state: State) -> State:
        """In a program, the state at rest; what stays in its variables is there when the program has run."""

    def write_variables(self, variables: Variables, state: State) -> None:
        """The Keras variables hold the values of a state that a program has stored, and nothing was waited for."""

    def write_metrics(self, variables: Variables, metrics: list) -> None:
        """The variables of the Keras metrics hold these values, and nothing was waited for."""

    def write_buffers(self, variables: Variables, buffers: list) -> None:
        """The variables that are no parameters hold these values, and nothing was waited for."""

    def watch(self, variables: list, given: list, look: Callable[[], None], lock: AbstractContextManager) -> Watch:
        """Once begun, `look` runs under the lock before a variable is read or set, or one of `given` is set."""

    def copied(self, values: Tree) -> Tree:
        """The numbers are the same, in arrays of their own, and nothing was waited for."""

    def read_captured(self, variables: list, state: State) -> list:
        """The newest values of variables that no program reads itself are returned; spending the state spares them."""

    def changed_outside(self, variables: list) -> list:
        """Only variables that hold what `write_variables` gave them are left out."""

    def params(self, state: State, apart: Collection[int] = ()) -> list:
        """The parameters are as the last update left them; those `apart` need not be read as a whole."""

    # ---- between host and devices ----

    def place(self, data: Tree) -> Tree:
        """Every leaf is on the device, with the same numbers; the nesting stays, and so does None."""

    def resident(self, data: Tree) -> Tree:
        """Every replica can gather rows of these data, again and again."""

    def staged(self, data: Tree) -> Tree:
        """A program takes these host arrays as it takes the same arrays placed."""

    def shard(self, data: Tree, shares: np.ndarray) -> Tree:
        """Replica i holds the rows shares[i], int (replicas, rows of a replica)."""

    def fetch(self, values: Tree) -> Tree:
        """Every leaf is numpy on the host, which has waited for it once, and waits nowhere else."""

    def is_ready(self, values: Tree) -> bool:
        """True only if to fetch the values would not wait for a device."""

    # ---- inside a program ----

    def traced(self, function: Callable) -> Callable:
        """The results are the function's; unless replicas are split, its Python runs once for each shape."""

    def inlined(self, function: Callable) -> Callable:
        """The results are the traced function's, and its gradient may be taken anywhere."""

    def shapes(self, function: Callable, *arguments: Tree) -> Tree:
        """The shapes and dtypes are those of what the function would return; nothing is computed."""

    def frame(self) -> object:
        """One object stands for the function that is being traced, another for a loop's body in it."""

    def is_traced_in(self, frame: object, value: Tensor) -> bool:
        """True if the frame is being traced, and the value is not that of one row which stands for several."""

    def is_kept(self, frame: object) -> bool:
        """True if a function compiled by itself, inside of the frame, keeps what is traced now for other frames."""

    def tracing_anew(self) -> AbstractContextManager:
        """A function compiled by itself is traced within, as if for the first time, unless it is one that `is_kept`."""

    def gather(self, data: Tree, rows: Tensor) -> Tree:
        """Every leaf has these rows, in this order; row numbers are in range."""

    def lookup(self, table: Tensor, places: Tensor) -> Tensor:
        """The table's rows at these places are returned; NaN for a place beyond the last."""

    def batch(self, data: Tree, rows: Tensor) -> Tree:
        """These rows are returned, to a replica its equal part; rows of sharded data are places in the shares."""

    def replica_slice(self, rows: Tensor) -> Tensor:
        """A replica gets its part's slice of a vector over the rows; outside, the vector stays whole."""

    def replica_start(self, size: int) -> Tensor | int:
        """A replica gets the place of the first row of its part, of so many; outside, it is 0."""

    def replica_params(self, params: list) -> list:
        """A replica gets its own values of the parameters; outside, they stay the same."""

    def total(
        self, function: Callable, data: Tree, carried: Tree, given: Tree, *, split: bool, syncs: bool
    ) -> tuple[Tree, Tree, Tree]:
        """If split, replicas run (data, carried, given) -> (sums, carried, alike); sums and changes are added up."""

    def differentiate(self, function: Callable, params: list) -> tuple[list, Tree]:
        """The gradients of params -> (scalar, auxiliary) are dense, and zero where the scalar depends on nothing."""

    def fold(self, function: Callable, carry: Tree, pieces: Tree, num: int) -> Tree:
        """The carry goes through (carry, piece) -> carry, piece by piece in order; pieces are (num, ...)."""

    def repeat(self, function: Callable, num: Tensor, state: State, reports: Tree) -> tuple[State, Tree]:
        """For i < num, (i, state) -> (state, report) runs until a state is stopped; other reports stay."""

    # ---- random draws ----

    @property
    def shuffles_slices(self) -> bool:
        """True if `keras.random.shuffle` moves whole slices; else each vector along the axis is shuffled for itself."""

    def words(self, seed: Tensor, stream: Tensor | int, first: Tensor | int, num_rows: int, num_words: int) -> Tensor:
        """Row i has the uint32 words of place first + i, the same on every engine; another number of them is others."""

    def gamma_slope(self, alpha: Tensor, sample: Tensor) -> Tensor:
        """The derivatives are those of gamma numbers by their parameter, while the random words stay."""

    # ---- the optimizer ----

    def loss_scale(self, state: State) -> Tensor:
        """The scale is what the optimizer multiplies a loss by now; 1 if it scales none."""

    def apply(self, state: State, new: State, grads: list, ok: Tensor, assigned: dict[int, Tensor]) -> State:
        """Where `ok`, the result is `new` after Keras' own update of params and slots; else it is `state`."""

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
        """The result is that of `apply` on whole tables; of those touched, the twin updates only the rows looked up."""

    def is_finite(self, values: list) -> Tensor:
        """True if every number is finite; also if there is none."""

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
        """The step has `num` groups of values; all groups are returned as it left them. `note` hears of other reads."""

    def trying(self, variables: Variables) -> AbstractContextManager:
        """What a step does to these variables within, where `shapes` calls it, is undone."""

    def attempt(
        self, function: Callable[[State], tuple[State, Tensor, Tree]], state: State, variables: Variables
    ) -> tuple[State, Tensor, Tree]:
        """Where (state) -> (state, is good, found) finds it good, the state is the new one; else all is as before."""

    # ---- programs ----

    def compile(self, function: Callable, examples: tuple, *, spends: bool = True, repeats: bool = False) -> Callable:
        """The program returns what the function does for such arguments; only if it `spends` is the first lost."""

    def again(self, program: Callable) -> Callable | None:
        """What is returned carries out the program, traced no more; None if the program does more than to return."""

    def describe(self, program: Callable) -> str:
        """Where there are several ways to carry out a program, the words say which."""

    def memory(self, program: Callable) -> int | None:
        """A program needs so many bytes beside arguments and results; None where nobody can tell."""

    def device_bytes(self) -> int | None:
        """The device has so many bytes of its own memory; None where its memory is the host's."""

    def loops_slowly(self, function: Callable, *arguments: Tree) -> bool:
        """True only if the function is known to run slower inside of a compiled loop."""
