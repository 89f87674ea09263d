"""Start ranks on this machine, run a function on each, and bring back their results or the first error.

`launch` starts ranks, runs one function and ends them; `Ranks` keeps them for one function after another.

**Ranks.** The parent is the process that calls `launch`. With `backend="threads"` a rank is a thread of the
parent (`thread_ranks`), and the process groups are those of `gradmesh.backends.threads`. With any other backend
a rank is a process (`process_ranks`): a fresh interpreter with the parent's flags, environment and `sys.path`,
which runs `rank_main` and never imports the parent's main module. The ranks find each other through a file that
only they can open (`private_store`). A rank joins the default process group once and serves calls until it is told to
end.

**Functions and results.** A thread gets the function and its arguments themselves, and returns its result
itself. A process gets them by pickle over a pipe: by name where a fresh interpreter can import that name
(`pickling`), else by value with cloudpickle (`by_value`). With a function that goes by value go the globals that
its code names, and the source lines that are in no file, such as those of a notebook cell. Results and exceptions
come back by pickle.

**Output.** Lines that ranks print reach the parent's `sys.stdout` and `sys.stderr` whole and start with the rank
(`output_lines`). Of a process, the parent reads the file descriptors 1 and 2 through pipes (`output_pipes`); for
threads, `sys.stdout` and `sys.stderr` are replaced while they run (`output_streams`). When the parent's stream is
broken, the ranks are ended and its error goes to the caller; a thread that printed gets it as its own.

**Errors.** The first rank that fails ends the run. The others get half a second to report failures of their own;
errors that only say that a peer was lost are passed over when the first failure is chosen. `RankError` has that
rank, its traceback as text, and its exception as the cause where that can be pickled (`outcomes`). After a
failure the ranks are gone, and the next run of `Ranks` starts new ones.

**Deaths.** A process that exits or is killed by a signal is a failure of its rank, with the exit code or the
signal. A process whose parent is gone exits at once.

**Returns.** A rank that has returned answers nobody. The groups of shm and threads know of it, and end the wait of
those that need it. Of other backends the launcher asks the ranks that are left whether they all wait (`stuck`).

**Timeouts.** When the ranks are not back in time, each late one is asked for its stack, which the error shows;
then all are ended.

**Ctrl-C.** It reaches the parent alone: rank processes are in sessions of their own and ignore SIGINT. The parent
ends the ranks, and `KeyboardInterrupt` goes on to the caller.

**The end.** Processes are told to leave, get ten seconds, and then they and what they started are killed.
Threads get an exception raised where they are; one that is inside C code cannot be ended and stays as a daemon.
"""

from gradmesh.launch.launcher import Ranks, launch

__all__ = ["Ranks", "launch"]
