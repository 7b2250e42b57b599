"""Runs a multi-role job from its request to its verdict.

Each role is a separate run below the job's run directory, with its own ranks, attempts and verdict.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from stoker.contract import env_vars, layout
from stoker.contract.errors import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import replace
from stoker.contract.masking import learn_secrets, mask_argv
from stoker.contract.safe_io import write_json
from stoker.contract.text import escape
from stoker.control.agent.prctl import set_name
from stoker.control.launch import background
from stoker.control.launch.session import Session
from stoker.control.machine.gpu_lock import GpuLocks
from stoker.control.plan import run_json
from stoker.control.plan.request import Request
from stoker.control.plan.run_dir import RunDir, discard_run_dir, open_run_dir
from stoker.control.plan.run_plan import RunPlan
from stoker.control.record.run_writer import RunWriter
from stoker.control.roles.job_plan import (
    JobPlan,
    JobResources,
    check_programs,
    choose_ports,
    describe_roles,
    digest_programs,
    make_hosts_file,
    make_run_plan,
)
from stoker.control.roles.placement import Placement, RankSlot, place_roles
from stoker.control.roles.role import NEVER, RoleSpec, sort_by_dependency
from stoker.control.roles.role_process import RoleProcess, RoleSettings
from stoker.control.roles.role_supervisor import RoleSupervisor


def launch_job(request: Request, plan: JobPlan, resources: JobResources, report: background.StartReport | None) -> int:
    """Run the job to its verdict and return the exit code."""
    session = Session(request, report)
    return session.run(lambda: Job(request, plan, resources, session))


class Job:
    """A multi-role job. It locks the GPUs and starts a `stoker run` for each role, which starts the agents."""

    def __init__(self, request: Request, plan: JobPlan, resources: JobResources, session: Session) -> None:
        self.request = request
        self.options = request.options
        self.plan = plan
        self.resources = resources
        self.session = session
        self.log = session.log
        self._locks = GpuLocks("")
        for spec in plan.specs:
            learn_secrets(spec.env, spec.command)
        if resources.cluster is not None:
            learn_secrets(resources.cluster.env)

    def close(self) -> None:
        self._locks.release()

    def execute(self) -> Verdict | None:
        """Return the verdict, or None for a dry run. Raises Refusal or Interrupted while nothing has been started."""
        specs, resources, here = self.plan.specs, self.resources, self.resources.cluster is None
        slots = place_roles(specs, resources.gpus, self.plan.share, resources.hosts)
        if self.options.max_restarts < 0:
            raise Refusal(f"--max-restarts must be 0 or more, got {self.options.max_restarts}", EX_USAGE)
        check_programs(specs, self.options, here)
        contents = (*(self.request.contents or ()), *digest_programs(specs, self.options))
        self.request = replace(self.request, contents=contents)
        run_dir = open_run_dir(self.request, os.environ)
        try:
            ports = choose_ports(specs, here)
            run_plan = make_run_plan(specs, slots, resources.lines, resources.hosts)
            descriptions = describe_roles(specs, slots, ports)
            if self.options.dry_run:
                self.session.print_run_dir(run_dir)
                self._print_plan(run_plan, run_dir, descriptions)
                return None
            environment = self._lock_gpus(slots, run_dir)
            record = RunWriter(run_dir.dir, os.uname().nodename, run_dir.reopened)
            description = run_json.describe(self.request, run_plan, run_dir, {}, self.session.start_time)
            notice = record.record_start(description, run_dir.first_attempt)
            self.session.record = record
        except BaseException:
            discard_run_dir(run_dir)
            raise
        for line in filter(None, (run_dir.location_notice, run_dir.notice, notice, *resources.lines, *descriptions)):
            self.log(line)
        self.session.report_start(run_dir)
        verdict = self._supervise(record, run_dir, slots, ports, environment)
        self.session.close_record(verdict, self.request, run_dir)
        return verdict

    def _supervise(
        self,
        record: RunWriter,
        run_dir: RunDir,
        slots: Mapping[str, tuple[RankSlot, ...]],
        ports: Mapping[str, int],
        environment: Mapping[str, str],
    ) -> Verdict:
        """Run the roles until the job has a verdict."""
        specs, resources, console = self.plan.specs, self.resources, self.session.console
        roles_dir = os.path.join(run_dir.dir, layout.ROLES)
        placement = Placement(
            specs,
            slots,
            resources.gpus,
            resources.hosts,
            self.plan.share,
            lambda spec, new_slots: self._write_hosts_file(roles_dir, spec, new_slots),
        )
        roles = []
        for spec in sort_by_dependency(specs, "", 0):
            file = self._write_hosts_file(roles_dir, spec, slots[spec.name])
            settings = self._role_settings(spec, ports.get(spec.name, 0), file)
            roles.append(RoleProcess(spec, settings, placement, roles_dir, console))
        supervisor = RoleSupervisor(
            roles,
            placement,
            record,
            run_dir.id,
            self.session.signals,
            self.log,
            self.options.max_restarts,
            environment,
            self._locks.fds,
            draws_bars=console.is_terminal(2),
        )
        return supervisor.run()

    def _print_plan(self, plan: RunPlan, run_dir: RunDir, descriptions: Sequence[str]) -> None:
        if self.options.json:
            self.session.print_plan(plan, run_dir)
            return
        lines = list(plan.lines)
        for role, description in zip(plan.roles, descriptions, strict=True):
            lines.append(f"{description}: {' '.join(mask_argv(role.argv))}")
            for rank in plan.places:
                if rank.role == role.name:
                    gpus = "; ".join(f"{gpu.name or 'GPU'} {gpu.uuid}" for gpu in rank.all_gpus)
                    lines.append(f"  rank {rank.role_rank}  {rank.label}{f'  {gpus}' if gpus else ''}")
        lines.append(f"record: {os.path.relpath(run_dir.dir)}")
        self.session.console.say(1, "\n".join(map(escape, lines)))

    def _role_settings(self, spec: RoleSpec, port: int, file: str) -> RoleSettings:
        options, cluster = self.options, self.resources.cluster
        flags = ["--hang-timeout", f"{options.hang_timeout:f}", "--busy-timeout", f"{options.busy_timeout:f}"]
        flags += ["--on-nan", options.on_nan, "--show", options.show]
        flags += ["--grace", f"{options.grace:f}"] if options.grace is not None else []
        flags += ["--python", options.python] if options.python is not None else []
        for name in ("stage", "ssh_option"):
            flags += [f"--{name.replace('_', '-')}={word}" for word in getattr(options, name)]
        for name in ("quiet", "no_preflight", "share_gpus", "isolate", "sync"):
            flags += [f"--{name.replace('_', '-')}"] if getattr(options, name) else []
        addresses, env = {"": "127.0.0.1"}, options.env
        if cluster is not None:
            addresses = {host.name: host.address or host.target for host in cluster.hosts}
            env = (*(f"{name}={value}" for name, value in cluster.env.items()), *env)
        max_restarts = options.max_restarts if spec.restart == NEVER else 0
        return RoleSettings(port, max_restarts, tuple(flags), addresses, env, file)

    def _write_hosts_file(self, roles_dir: str, spec: RoleSpec, slots: Sequence[RankSlot]) -> str:
        """Write a role's hosts file and return its path, or "" if the job runs on this machine."""
        if self.resources.cluster is None:
            return ""
        path = os.path.join(roles_dir, f"{spec.name}.hosts.json")
        os.makedirs(roles_dir, 0o700, exist_ok=True)
        write_json(path, make_hosts_file(self.resources.cluster, slots))
        return path

    def _lock_gpus(self, slots: Mapping[str, Sequence[RankSlot]], run_dir: RunDir) -> dict[str, str]:
        """Lock the GPUs for the whole job, so that nobody takes one while a server is replaced.

        Returns the environment of the roles. On other hosts each role's own agent locks its GPUs.
        """
        uuids = list(
            dict.fromkeys(gpu.uuid for role_slots in slots.values() for slot in role_slots for gpu in slot.gpus)
        )
        if not uuids or self.options.share_gpus or self.resources.cluster is not None:
            return dict(os.environ)
        self._locks.run_id = run_dir.id
        set_name(b"stoker-job")  # name of the holder for others who want the GPUs
        refused = self._locks.take(uuids)
        if refused:
            holders = "; ".join(f"GPU {uuid} by {holder}" for uuid, holder in refused.items())
            raise Refusal(f"the GPUs are in use: {holders}", EX_UNAVAILABLE, cause="gpu.busy")
        for notice in self._locks.notices:
            self.log(f"stoker: {notice}")
        return {**os.environ, env_vars.GPU_LENDER: str(os.getpid())}
