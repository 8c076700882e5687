"""The board Workers and server: which processes are there, are they well, and is the server."""

from __future__ import annotations

from typing import Final

from .health import share_of_budget, share_of_server
from .panels import Panel, lines
from .promql import RATE, Target, aggregate, greatest, rate, run_rate, selector, total

ALIVE: Final[list[Panel]] = [
    lines(
        "Processes that answer",
        "short",
        "Processes whose metrics Prometheus can read, by stage.",
        "A step down: a process has died, was taken away, or hangs.",
        Target(aggregate("count", selector("build_info"), "stage"), "{{stage}}"),
    ),
    lines(
        "up",
        "short",
        "Targets of the job streamadv: 1 answers its scrape, 0 does not.",
        "0: the process has died or hangs: its log says why. Its name is host and port.",
        Target('min by (instance) (up{job="streamadv"})', "{{instance}}"),
        high=1,
    ),
    lines(
        "Workers by stream",
        "short",
        "Processes that ask for the entries of a stream, by the server: alive, or dead (silent for 30 s).",
        "0 alive: nobody serves that stream: start the stage. dead ones were killed; one that is told to end leaves.",
        Target(total("run_workers", by="stream, state"), "{{stream}}, {{state}}"),
    ),
    lines(
        "Producers",
        "short",
        "open: alive. finished: they said so. lost: silent for 30 s without having finished.",
        "lost: it was killed; its open groups wait for their deadline. open at 0: nothing comes in.",
        Target(total("run_producers", by="state"), "{{state}}"),
        stack=True,
    ),
    lines(
        "Trainer ranks",
        "short",
        "Ranks of the trainer that were heard of in the last 30 s, and how many there should be.",
        "Fewer alive than expected: the others wait for a rank that has died. See that rank's log.",
        Target(total("run_trainer_ranks", by="state"), "{{state}}"),
    ),
    lines(
        "Starts in 10 minutes",
        "short",
        "How often a process at the same address has started anew in the last ten minutes, by stage.",
        "Above 1 or 2: it crashes again and again: see its log. Kubernetes: a new pod is a new address.",
        Target(
            f"sum by (stage) (changes({selector('process_start_time_seconds')}[10m])"
            f" * on (instance, run) group_right () {selector('build_info')})",
            "{{stage}}",
        ),
    ),
    lines(
        "Seconds since a stage last finished something",
        "s",
        "By stage, the most recent of its processes.",
        "Rises for ever: the stage stands still, or has nothing to do; see its stream's age. A line that ends: its "
        "last process is gone.",
        Target(f"time() - {greatest('last_success_timestamp_seconds', by='stage')}", "{{stage}}"),
    ),
    lines(
        "Stream entries",
        "ops",
        "Entries a second, by stage. delivered and acked agree.",
        "reclaimed: taken over from a process that died. duplicate: finished twice, harmless; many: the lease is too "
        "short for the work.",
        *(
            Target(rate(f"{event}_total", by="stage"), f"{{{{stage}}}} {event}")
            for event in ("delivered", "acked", "reclaimed", "duplicate")
        ),
    ),
    lines(
        "Connection trouble",
        "ops",
        "Errors of the server or network after which a call was tried again, and consumer groups made.",
        "A burst: a restart or failover, which repairs itself. Without end: the reason names what to look at.",
        Target(f"{rate('connection_errors_total', by='stage, reason')} > 0", "{{stage}}: {{reason}}"),
        Target(f"{rate('nogroup_recreations_total', by='stage')} > 0", "{{stage}}: consumer group made"),
    ),
]

RESOURCES: Final[list[Panel]] = [
    lines(
        "Processor time",
        "percentunit",
        "Processor time of each process, of one core.",
        "At 100 % a grouper or producer is at its limit: start more of it.",
        Target(f"sum by (instance) (rate({selector('process_cpu_seconds_total')}{RATE}))", "{{instance}}"),
    ),
    lines(
        "Memory of processes",
        "bytes",
        "Resident memory of each process.",
        "Grows without end: please report it, with the board's time range.",
        Target(f"max by (instance) ({selector('process_resident_memory_bytes')})", "{{instance}}"),
    ),
    lines(
        "Open files",
        "percentunit",
        "Share of the file descriptors that a process may open.",
        "Near 1: raise the limit (ulimit -n); above 0.8 new connections soon fail.",
        Target(
            f"max by (instance) ({selector('process_open_fds')} / {selector('process_max_fds')})",
            "{{instance}}",
        ),
        high=1,
    ),
]

SERVER: Final[list[Panel]] = [
    lines(
        "Memory used",
        "percentunit",
        "Live and reserved bytes of max_bytes, by run; the server's memory of its maxmemory.",
        "max_bytes near 1: producers wait for commits. maxmemory near 1: the server refuses pushes; what is stored "
        "drains. Commit more often, or raise the limit.",
        Target(f"max by (of) ({share_of_budget()} or {share_of_server()})", "of {{of}}"),
        high=1,
    ),
    lines(
        "Memory of the server",
        "bytes",
        "Memory that the server uses, its maxmemory, and the machine's (in a cluster: of the fullest node).",
        "used near maxmemory with live bytes flat: other data lies on the server, or dead letters and uncommitted "
        "batches pile up.",
        Target(greatest("run_server_used_memory_bytes"), "used"),
        Target(greatest("run_server_maxmemory_bytes"), "maxmemory"),
        Target(greatest("run_server_total_memory_bytes"), "machine"),
    ),
    lines(
        "Time to read the run",
        "s",
        "How long an exporter needs to read the run's facts for a scrape; it gives up after 3 s.",
        "Above 1 s: the server or the network is slow, or somebody's script keeps it busy.",
        Target(greatest("run_read_seconds"), "read"),
    ),
    lines(
        "Duplicates and malformed",
        "ops",
        "Copies of trajectories refused, and items removed that no process of the run had written; a second.",
        "Duplicates: producers send again after a server came back, harmless. malformed: somebody else writes to "
        "the run's keys: see its access rules.",
        Target(run_rate("run_duplicate_trajectories_total"), "duplicate"),
        Target(run_rate("run_malformed_total"), "malformed"),
    ),
    lines(
        "To delete",
        "short",
        "Payloads of ended groups that wait to be deleted, and entries of the results log.",
        "Grows without end: no grouper sweeps, or no trainer closes its batches.",
        Target(total("run_garbage_payloads"), "payloads"),
        Target(total("run_results_entries"), "results"),
    ),
    lines(
        "Full and paced shards",
        "short",
        "Shards that admit no other group: without room in bytes, or with their share of groups ahead.",
        "full: memory, see above. paced: as it should be while the trainer is the slow side.",
        Target(total("run_full_shards"), "full"),
        Target(total("run_paced_shards"), "paced"),
    ),
    lines(
        "Processor of the server",
        "percentunit",
        "Processor time of each server's thread for commands, of one core. By the Redis exporter (job redis), as the "
        "next two: all servers that it watches, whatever run.",
        "Near 100 %: this server is at its limit: more shards on more primaries, or fewer others on it. Empty: no "
        "exporter is scraped.",
        Target(
            f"sum by (instance) (rate(redis_cpu_user_main_thread_seconds_total{RATE})"
            f" + rate(redis_cpu_sys_main_thread_seconds_total{RATE}))",
            "{{instance}}",
        ),
    ),
    lines(
        "Connections",
        "short",
        "Clients of each server, those of them that wait for entries, and connections refused in ten minutes.",
        "refused above 0: the server is at its maxclients. Clients grow without end: something connects and does not "
        "close.",
        Target("max by (instance) (redis_connected_clients)", "{{instance}} clients"),
        Target("max by (instance) (redis_blocked_clients)", "{{instance}} waiting"),
        Target("max by (instance) (increase(redis_rejected_connections_total[10m]))", "{{instance}} refused"),
    ),
    lines(
        "Append-only file",
        "short",
        "1 where a server writes its append-only file, and where the last write succeeded; keys evicted in 10 minutes.",
        "writes at 0: a restart loses the run, set appendonly yes. last write at 0: its disk is full or broken. "
        "evicted above 0: trajectories are being deleted, set maxmemory-policy noeviction at once.",
        Target("min by (instance) (redis_aof_enabled)", "{{instance}} writes"),
        Target("min by (instance) (redis_aof_last_write_status)", "{{instance}} last write"),
        Target("max by (instance) (increase(redis_evicted_keys_total[10m]))", "{{instance}} evicted"),
    ),
]

ROWS: Final = [("Processes", ALIVE), ("What processes use", RESOURCES), ("Server", SERVER)]
