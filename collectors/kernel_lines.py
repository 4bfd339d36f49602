"""Which kernel messages mean trouble: one message in, one event (or a GPU's address, or nothing) out. Pure.

Each rule has a needle (a cheap substring test that nearly every message fails), a pattern and a maker. To
teach a new message, add a rule here and its lines to the tests.
"""

from __future__ import annotations

import re

import msgspec

from forewarn.collectors import kernel_events as make
from forewarn.collectors.kernel_events import BDF, Found, GpuAddress, Maker, off_bus_event


class Rule(msgspec.Struct, frozen=True):
    needle: str
    pattern: re.Pattern[str]
    maker: Maker


_DEV = r"(?:\S{1,64} )?(" + BDF + r")"
"""`driver dddd:bb:dd.f`, as dev_err() begins its lines."""
_QUOTED = re.compile(
    r"(?:Product|Manufacturer|SerialNumber): |oom-kill:|\bcomm[=:]|\bcmdline|audit\(|segfault at"
)
"""Before these the kernel speaks; behind them it repeats what a device or a program calls itself."""


def _rule(needle: str, pattern: str, maker: Maker) -> Rule:
    return Rule(needle, re.compile(pattern, re.DOTALL), maker)


_MLX5 = r"(?:mlx5_core (?P<pci>" + BDF + r")\S*\s[^\n]{0,160}?|[^\n]{0,80}?)"
_FS = r"(?:(?:EXT[234]-fs|XFS|BTRFS|F2FS-fs|FAT-fs|NTFS|JFS|ocfs2|GFS2)[^\n(]{0,40}(?:\((?:device )?([^\s)]{1,64})\))?[^\n]{0,120}?)?"

_EFA = r"(?:efa (?P<pci>" + BDF + r")|infiniband (?P<name>(?:rdmap|efa_)[\w-]{1,32})):[^\n]{0,80}?"
"""AWS's fabric adapter; its network driver says much the same under another name."""

RULES: tuple[Rule, ...] = (
    _rule(
        "Xid",
        r"NVRM:\s{1,4}(?:GPU\d{1,3} )?Xid \((?:PCI:)?(?P<pci>(?:[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}|[0-9a-fA-F]{2,4}:[0-9a-fA-F]{2})(?:\.[0-9a-fA-F])?)"
        r"(?:[ ,]{1,2}GPU-I:(?P<gi>\d{1,4}))?(?:[ ,]{1,2}GPU-CI:(?P<ci>\d{1,4}))?[^)\n]{0,64}\):\s{0,4}(?P<number>\d{1,5})(?:,|\s|:|$)(?P<rest>.*)",
        make.xid,
    ),
    _rule(
        "SXid",
        r"nvidia-nvswitch(?P<switch>\d{0,4}):\s{1,4}SXid \((?:PCI:)?(?P<pci>"
        + BDF
        + r")\):\s{0,4}(?P<number>\d{1,6})(?:,|\s|$)(?P<rest>.*)",
        make.sxid,
    ),
    _rule(
        "fallen off the bus",
        r"NVRM:\s{1,4}(?:The NVIDIA )?GPU (?:at )?(?:PCI:)?(?P<pci>" + BDF + r").{0,400}?fallen off the bus",
        make.off_bus,
    ),
    _rule(
        "GPU-",
        r"NVRM:\s{1,4}GPU at (?:PCI:)?(" + BDF + r"):\s{1,4}(GPU-[0-9a-zA-Z-]{1,64})",
        make.gpu_address,
    ),
    _rule("RmInitAdapter", r"NVRM:\s{1,4}GPU (" + BDF + r"): RmInitAdapter failed", make.init_failed),
    _rule(
        "AER:",
        r"(?:\S{1,64} (?P<port>"
        + BDF
        + r"): )?AER: (?:Multiple )?(?P<class>(?:Corrected|Correctable|Uncorrected|Uncorrectable)(?: \([A-Za-z-]{1,16}\))?)"
        r" error(?: message)? received(?: from|:)?(?: (?P<source>" + BDF + r")| ?id=(?P<id>[0-9a-fA-F]{4}))?",
        make.aer_received,
    ),
    _rule(
        "PCIe Bus Error",
        r"\S{1,64} (?P<pci>"
        + BDF
        + r"): (?:AER: )?PCIe Bus Error: severity=(?P<class>[A-Za-z-]{1,20}(?: \([A-Za-z-]{1,16}\))?)",
        make.aer_detail,
    ),
    _rule(
        "AER:",
        r"\S{1,64} ("
        + BDF
        + r"): AER: (?:can't recover|device recovery failed|Device recovery failed|recovery failed)",
        make.aer_unrecoverable,
    ),
    _rule(
        "DPC",
        r"\S{1,64} ("
        + BDF
        + r"): (?:DPC: )?(?:containment event|DPC: unmasked uncorrectable error|unmasked uncorrectable error detected)",
        make.dpc,
    ),
    _rule(
        "Slot(",
        r"\S{1,64} (" + BDF + r")\S{0,24}: (?:pciehp: )?Slot\([^)]{1,16}\): (Link Down|Card not present)",
        make.slot,
    ),
    _rule(
        "inaccessible",
        _DEV
        + r": (?:Unable to change power state|can't change power state) from \S{1,16} to \S{1,16}[^\n]{0,20}inaccessible",
        make.pcie_gone,
    ),
    _rule(
        "Machine Check",
        r"(?:mce: )?(?:\[Hardware Error\]: )?CPU:? ?\d{1,5}: Machine Check( Exception)?:\s{1,4}[0-9a-f]{1,4} Bank (\d{1,4}): ([0-9a-fA-F]{1,16})",
        make.mce_bank,
    ),
    _rule(
        "event severity",
        r"(?:\{\d{1,6}\})?\[Hardware Error\]: +event severity: (corrected|recoverable|fatal|info)",
        make.ghes,
    ),
    _rule(
        "[Hardware Error]",
        r"(?:\{\d{1,6}\})?(?:mce: )?\[Hardware Error\]: (Corrected error|Uncorrected|Deferred error|Fatal)",
        make.mce_amd,
    ),
    _rule(
        "Machine check events logged",
        r"(?:mce: )?(?:\[Hardware Error\]: )?Machine check events logged",
        make.mce_logged,
    ),
    _rule(
        "Uncorrected hardware memory error",
        r"(?:mce: |MCE )?[^\n]{0,40}?Uncorrected hardware memory error",
        make.mce_memory,
    ),
    _rule(
        "Memory failure",
        r"(?:MCE )?Memory failure: 0x[0-9a-f]{1,16}: (?:recovery action|Sending SIGBUS|Killing)",
        make.memory_failure,
    ),
    _rule(
        "EDAC",
        r"EDAC (?:\S{1,24} )?MC(?P<mc>\d{1,4}): (?:(?P<count>\d{1,9}) )?(?P<class>[UC]E)\b(?:[^\n]{0,60}? on (?:any memory|(?P<dimm>[^\s(]{1,80})))?",
        make.edac_error,
    ),
    _rule(
        "above threshold",
        r"(?:mce: )?(?:CPU\d{1,5}: )?(?:Core |Package )?[Tt]emperature (?:is )?above threshold",
        make.throttle,
    ),
    _rule(
        "emperature",
        r"(?:\S{1,40}(?: \S{1,40})?: )?[Cc]ritical temperature reached[^\n]{0,80}",
        make.hot_shutdown,
    ),
    _rule(
        "Disabling device",
        r"nvme (nvme\d{1,4}): Disabling device after reset failure",
        make.nvme("dead", "critical"),
    ),
    _rule(
        "Removing after probe failure",
        r"nvme (nvme\d{1,4}): Removing after probe failure",
        make.nvme("dead", "critical"),
    ),
    _rule(
        "Device not ready",
        r"nvme (nvme\d{1,4}): Device not ready; aborting (?:reset|initiali[sz]ation)",
        make.nvme("dead", "critical"),
    ),
    _rule(
        "timeout",
        r"nvme (nvme\d{1,4}): (?:I/O|Abort|Cmd|Admin)\b[^\n]{0,120}?\btimeout, (?:reset controller|aborting|completion polled|disable controller)[^\n]{0,40}",
        make.nvme_timeout,
    ),
    _rule("controller is down", r"nvme (nvme\d{1,4}): controller is down", make.nvme("reset", "error")),
    _rule("resetting controller", r"nvme (nvme\d{1,4}): resetting controller", make.nvme("reset", "error")),
    _rule(
        "frozen state error", r"nvme (nvme\d{1,4}): frozen state error detected", make.nvme("reset", "error")
    ),
    _rule(
        "no available path",
        r"block (nvme\d{1,4}\S{0,16}): no available path - failing I/O",
        make.nvme("io_error", "critical"),
    ),
    _rule(
        "I/O Error",
        r"(?:nvme )?(nvme\d{1,4}(?:c\d{1,4})?(?:n\d{1,4})?): (?:I/O|Admin) Cmd\(0x[0-9a-f]{1,4}\)[^\n]{0,120}?I/O Error",
        make.nvme("io_error", "error"),
    ),
    _rule("exception Emask", r"(ata\d{1,3}(?:\.\d{1,2})?): exception Emask", make.ata("exception", "error")),
    _rule(
        "ata",
        r"(ata\d{1,3}\.\d{1,2}): (?:disabled|disable device|detaching)",
        make.ata("disabled", "critical"),
    ),
    _rule("resetting link", r"(ata\d{1,3}(?:\.\d{1,2})?): hard resetting link", make.ata("reset", "warning")),
    _rule(
        "ata",
        r"(ata\d{1,3}(?:\.\d{1,2})?): (?:softreset failed|COMRESET failed|SRST failed|reset failed)",
        make.ata("reset", "error"),
    ),
    _rule(
        "error:",
        r"(ata\d{1,3}(?:\.\d{1,2})?): error: \{ [^}\n]{0,40}(?:UNC|IDNF|ABRT|ICRC|AMNF)",
        make.ata("io_error", "error"),
    ),
    _rule(
        "dev",
        r"(?:blk_update_request: |print_req_error: |end_request: )?(I/O error|critical (?:medium|target|nexus|space allocation) error|protection error|timeout error), dev ([\w!-]{1,64}),? sector",
        make.block_layer,
    ),
    _rule(
        "Buffer I/O error",
        r"Buffer I/O error on dev(?:ice)? ([\w!-]{1,64})(?:,|\s|$)",
        make.block_device("io_error", "error"),
    ),
    _rule(
        "Sense Key",
        r"sd [\d:]{7,24} ?:? ?\[([a-z]{2,8})\] (?:tag#\d{1,6} )?(?:\S{1,12} )?Sense Key : Medium Error",
        make.block_device("medium_error", "error"),
    ),
    _rule(
        "Sense Key",
        r"sd [\d:]{7,24} ?:? ?\[([a-z]{2,8})\] (?:tag#\d{1,6} )?(?:\S{1,12} )?Sense Key : Hardware Error",
        make.block_device("io_error", "critical"),
    ),
    _rule(
        "rejecting I/O",
        r"sd ([\d:]{7,24}) ?(?:\[[a-z]{2,8}\] )?rejecting I/O to (?:offline|dead) device",
        make.block_device("io_error", "critical"),
    ),
    _rule(
        "Device offlined",
        r"sd ([\d:]{7,24}) ?(?:\[[a-z]{2,8}\] )?Device offlined",
        make.block_device("io_error", "critical"),
    ),
    _rule(
        "beyond end of device",
        r"(?:[^\s:]{1,64}(?::\S{1,16})?: )?(?:attempt to )?access beyond end of device",
        make.beyond_end,
    ),
    _rule("Disk failure on", r"md/\S{1,32} ?Disk failure on ([\w!-]{1,64})[, ]", make.raid),
    _rule(
        "emounting filesystem read-only",
        _FS + r"[Rr]emounting filesystem read-only",
        make.filesystem("read_only", "critical"),
    ),
    _rule(
        "read-only",
        r"(?:EXT[234]-fs|FAT-fs|F2FS-fs) \(([^\s)]{1,64})\): [^\n]{0,40}(?:has been set|mounted|remounted) read-only",
        make.filesystem("read_only", "critical"),
    ),
    _rule(
        "forced readonly",
        r"BTRFS[^\n(]{0,40}\((?:device )?([^\s):]{1,64})[^)\n]{0,40}\)[^\n]{0,120}?forced readonly",
        make.filesystem("read_only", "critical"),
    ),
    _rule(
        "riting superblock", _FS + r"I/O error while writing superblock", make.filesystem("error", "error")
    ),
    _rule(
        "-fs error",
        r"(?:EXT[234]|F2FS|FAT)-fs error \(device ([^\s)]{1,64})\)",
        make.filesystem("error", "error"),
    ),
    _rule(
        "XFS",
        r"XFS \(([^\s)]{1,64})\): [^\n]{0,160}?(?:shut ?down|Shutting down)",
        make.filesystem("error", "critical"),
    ),
    _rule(
        "XFS",
        r"XFS \(([^\s)]{1,64})\): [^\n]{0,160}?(?:[Mm]etadata (?:I/O error|corruption|CRC error)|Corruption |log I/O error|Internal error|I/O [Ee]rror)",
        make.filesystem("error", "error"),
    ),
    _rule(
        "BTRFS",
        r"BTRFS:? (?:error|critical)[^\n(]{0,16}\((?:device )?([^\s):]{1,64})[^)\n]{0,40}\)",
        make.filesystem("error", "error"),
    ),
    _rule(
        "Aborting journal",
        r"(?:JBD2: )?Aborting journal on device ([^\s.]{1,64})",
        make.filesystem("error", "error"),
    ),
    _rule(
        "JBD2",
        r"JBD2: (?:Error|I/O error|Detected IO errors)[^\n]{0,80}?(?: (?:on|for) (?:device )?([\w!-]{1,64}))?",
        make.filesystem("error", "error"),
    ),
    _rule(
        "insufficient power",
        _MLX5 + r"Detected insufficient power on the PCIe slot",
        make.mlx5("slot_power", "warning"),
    ),
    _rule(
        "Port module event",
        _MLX5 + r"Port module event(?P<error>\[error\])?: module (?P<module>\d{1,3}), (?P<what>[^\n]{1,120})",
        make.mlx5_module,
    ),
    _rule(
        "mlx5",
        r"mlx5_core (?:(?P<pci>" + BDF + r"):? )?(?P<name>[\w.-]{1,32}): [Ll]ink (?P<state>[Uu]p|[Dd]own)",
        make.mlx5_link,
    ),
    _rule(
        "High temperature on sensors",
        _MLX5 + r"High temperature on sensors",
        make.mlx5("temperature", "error"),
    ),
    _rule(
        "ealth issue observed",
        _MLX5
        + r"Health issue observed, (?P<what>[^\n,]{1,80})(?:, severity\(\d{1,2}\) (?P<level>[A-Z]{1,16}))?",
        make.mlx5_health_issue,
    ),
    _rule("health compromised", _MLX5 + r"device's health compromised", make.mlx5_health),
    _rule("poll_health", _MLX5 + r"poll_health:[^\n]{0,40}Fatal error \d{1,4} detected", make.mlx5_health),
    _rule(
        "unrecoverable",
        r"mlx5_core (?P<pci>" + BDF + r")[^\n]{0,160}?unrecoverable (?:hardware |firmware )?error",
        make.mlx5_health,
    ),
    _rule(
        "mlx5",
        r"mlx5_core (?P<pci>"
        + BDF
        + r")[^\n]{0,80}?(?:firmware (?:fatal|internal) error|mlx5_health_try_recover|device recovery failed|health recovery failed|enter_error_state[^\n]{0,40}start)",
        make.mlx5_health,
    ),
    _rule(
        "leak of a command",
        _MLX5 + r"timeout\. Will cause a leak of a command resource",
        make.mlx5("command_timeout", "critical"),
    ),
    _rule(
        "timeout detected",
        r"mlx5_core (?P<pci>" + BDF + r")[^\n]{0,80}?TX timeout detected",
        make.mlx5("tx_timeout", "error"),
    ),
    _rule(
        "NETDEV WATCHDOG",
        r"(?:mlx5_core (?P<pci>"
        + BDF
        + r") [^\n]{0,40}?NETDEV WATCHDOG|NETDEV WATCHDOG: \S{1,32} \(mlx5_core\))[^\n]{0,60}?timed out",
        make.mlx5("tx_timeout", "error"),
    ),
    _rule(
        "RX timeout on channel",
        r"mlx5_core (?P<pci>" + BDF + r")[^\n]{0,80}?RX timeout on channel",
        make.mlx5("rx_timeout", "error"),
    ),
    _rule(
        "completion",
        _EFA
        + r"(?:Wait for completion \(polling\) timeout|The device didn't send any completion for admin cmd)",
        make.efa("command_timeout", "critical"),
    ),
    _rule("Admin queue is closed", _EFA + r"Admin queue is closed", make.efa("queue_closed", "critical")),
    _rule("Failed to ", _EFA + r"Failed to (?:process|submit) command", make.efa("command_failed", "error")),
    _rule(
        "evice",
        _EFA + r"(?:Device isn't ready, can't reset device|Device isn't ready, abort com init)",
        make.efa("not_ready", "critical"),
    ),
    _rule(
        "Reset indication",
        _EFA + r"Reset indication didn't turn (?:on|off)",
        make.efa("reset_failed", "critical"),
    ),
    _rule(
        "ink is ",
        r"\S{1,32} (?P<pci>"
        + BDF
        + r"):? (?P<name>[\w.-]{1,32}): (?:NIC )?[Ll]ink is (?P<state>[Uu]p|[Dd]own)",
        make.link_state,
    ),
    _rule(
        "ink is ",
        r"(?P<pci>)(?:\S{1,32}: )?(?P<name>[\w.-]{1,32}):? NIC [Ll]ink is (?P<state>[Uu]p|[Dd]own)",
        make.link_state,
    ),
    _rule(
        "becomes ready",
        r"(?P<pci>)(?:IPv6: )?ADDRCONF\(NETDEV_CHANGE\): (?P<name>[\w.-]{1,32}): link becomes (?P<state>ready)",
        make.link_state,
    ),
    _rule(
        "definitely",
        r"(\S{1,32}): \(slave ([\w.-]{1,32})\): link status definitely (up|down)",
        make.slave_state,
    ),
    _rule(
        "oom-kill:",
        r"oom-kill:constraint=[^\n]{0,4000}?,task=(?P<name>[^,\n]{1,64}),pid=(?P<pid>\d{1,10})",
        make.oom_kill,
    ),
    _rule(
        "illed process",
        r"(?:(?:Memory cgroup )?[Oo]ut of memory: |oom_reaper: )?Killed process (?P<pid>\d{1,10}),? ?(?:UID \d{1,10},? )?\((?P<name>[^\n]{1,64}?)\)",
        make.oom_kill,
    ),
    _rule(
        "blocked for more than",
        r"(?:INFO: )?task ([^\n]{1,64}?):(\d{1,10}) (?:\S{1,32} )?blocked for more than (\d{1,9}) seconds",
        make.hung,
    ),
    _rule(
        "soft lockup",
        r"(?:NMI )?(?:watchdog: )?BUG: soft lockup - CPU#(\d{1,5}) stuck for",
        make.lockup("soft", "error"),
    ),
    _rule(
        "ard LOCKUP",
        r"(?:NMI )?(?:watchdog: )?(?:Kernel panic - not syncing: )?(?:Watchdog )?(?:detected |CPU:?\s?\d{0,5} )?[Hh]ard LOCKUP(?: on cpu (\d{1,5}))?",
        make.lockup("hard", "critical"),
    ),
    _rule(
        "stall",
        r"(?:rcu: )?(?:INFO: )?(?:rcu_\w{1,24}|rcu) (?:self-)?detected (?:expedited )?stalls? on (?:CPUs?(?:/tasks)?|()tasks)",
        make.lockup("rcu_stall", "error"),
    ),
    _rule(
        "kthread starved",
        r"(?:rcu: )?(?:INFO: )?rcu_\w{1,24} kthread (?:timer wakeup didn't happen|starved) for ()",
        make.lockup("rcu_stall", "error"),
    ),
)

_REPEATED = re.compile(r"message repeated (\d{1,6}) times: \[\s?(.*)\]\s*$", re.DOTALL)


def classify(message: str, *, strict: bool = False) -> Found | GpuAddress | None:
    """What one kernel message (without its prefix) says, None when it says nothing of interest.

    `strict` takes a message only by its beginning, as the kernel's own device gives it; else the message may
    stand behind a prefix of unknown make.
    """
    count = 1
    if "message repeated" in message and (m := _REPEATED.search(message)):
        count, message = int(m[1]), m[2]
    for rule in RULES:
        if rule.needle not in message:
            continue
        match = rule.pattern.match(message) if strict else rule.pattern.search(message)
        if match is None:
            continue
        if match.start() and _QUOTED.search(message, 0, match.start()):
            continue
        found = rule.maker(match, message)
        if isinstance(found, Found) and count > 1:
            return msgspec.structs.replace(
                found,
                event=msgspec.structs.replace(found.event, count=found.event.count * count),
                implied=False,
            )
        return found
    return None


_OFF_BUS_BEGIN = re.compile(r"NVRM:\s{1,4}(?:The NVIDIA )?GPU (?:at )?(?:PCI:)?(" + BDF + r")")
_OFF_BUS_END = re.compile(r"NVRM:[^\n]{0,80}fallen off the bus")
OFF_BUS_LINES = 3
"""The off-bus text may be spread over this many lines, each a record of its own."""


class Conversation:
    """Reads messages in order, and puts together what the driver spreads over several records."""

    def __init__(self) -> None:
        self._pci = ""
        self._lines_left = 0

    def read(self, message: str, *, strict: bool = False) -> list[Found | GpuAddress]:
        """What one record says. A record of several lines (real breaks, or the two characters `\\n` that
        some logs write for one) is read whole first, then line by line."""
        if "\\n" in message:
            message = message.replace("\\n", "\n")
        lines = [line.strip() for line in message.split("\n")] if "\n" in message else [message]
        if len(lines) == 1:
            found = self._line(lines[0], strict)
            return [found] if found else []
        results = [found for line in lines if (found := self._line(line, strict))]
        if not results and (found := classify(message, strict=strict)):
            results.append(found)
        return results

    def _line(self, line: str, strict: bool) -> Found | GpuAddress | None:
        found = classify(line, strict=strict)
        if found is None and "NVRM" in line:
            if self._lines_left and _OFF_BUS_END.search(line):
                self._lines_left = 0
                return Found(off_bus_event(self._pci, f"NVRM: GPU {self._pci} ... {line}"), implied=True)
            if m := _OFF_BUS_BEGIN.search(line):
                self._pci, self._lines_left = m[1], OFF_BUS_LINES
                return None
        if self._lines_left:
            self._lines_left -= 1
        return found
