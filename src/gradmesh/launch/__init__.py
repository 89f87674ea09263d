"""Start ranks on this host, run a function on each, and return their results or raise the first error.

`launch` starts ranks, runs one function and stops them; `Ranks` keeps them running for several functions.

**Ranks.** The parent is the process that calls `launch`. With `backend="threads"` a rank is a thread of the parent
(`thread_ranks`), and the process groups are those of `gradmesh.backends.threads`. With any other backend a rank is a
process (`process_ranks`): a fresh interpreter with the parent's flags, environment and `sys.path`, which runs
`process_ranks.main` and never imports the parent's main module. The ranks rendezvous through a file that only they can
open. A rank joins the default process group once and serves calls until the parent ends it.

**Functions and results.** A thread gets the function and arguments as the same objects, and returns its result as the
same object. A process gets them pickled through a pipe: by name if a fresh interpreter can import that name
(`pickling`), else by value with cloudpickle, together with the globals that the code names and
source lines that are not in a file, such as those of a notebook cell. Results and exceptions are returned by pickle.

**Output.** Lines that ranks print reach the parent's `sys.stdout` and `sys.stderr` complete and prefixed with the rank
(`output`). For processes the parent reads file descriptors 1 and 2 through pipes; for threads
`sys.stdout` and `sys.stderr` are replaced while they run. If the parent's stream is broken, the
ranks are stopped and the caller gets the error; a thread that printed gets it too.

**Errors.** The first rank that fails ends the run. The others have half a second to report their failures; errors that
only report a lost peer are skipped when choosing the first failure. `RankError` has that rank, its traceback as text,
and its exception as the cause if it can be pickled (`outcomes`). A failure stops all ranks, and the next run of `Ranks`
starts new ones.

**Crashes.** A process that exits or is killed by a signal is a failure of its rank, with the exit code or signal. A
process whose parent is gone exits immediately.

**Returned ranks.** A rank that has returned no longer takes part in collectives. The shm and threads backends detect
this and end the wait of other ranks; for other backends `hang_detector` checks whether all remaining ranks wait.

**Timeouts.** After the timeout each late rank reports its stack for the error; then all ranks are stopped.

**Ctrl-C.** Only the parent receives it: rank processes are in separate sessions and ignore SIGINT. The parent stops the
ranks, and `KeyboardInterrupt` propagates to the caller.

**Shutdown.** Processes have ten seconds to exit; then they and their child processes are killed. In threads an
exception is raised; a thread inside C code cannot be stopped and remains as a daemon.
"""

from gradmesh.launch.launcher import Ranks, launch

__all__ = ["Ranks", "launch"]
