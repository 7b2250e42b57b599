"""Generates docs/metrics.md from the metric table:   python -m stoker.control.show.metrics.metric_docs > docs/metrics.md"""

from __future__ import annotations

from stoker.control.show.metrics.metric_table import COUNTER, GROUPS

_HEAD = """# Metrics for Prometheus

Generated from the code by `python -m stoker.control.show.metrics.metric_docs`; a test checks that it is current.

```bash
stoker metrics                        # http://127.0.0.1:9911/metrics: all runs of the folder, this machine, its GPUs
stoker metrics --once                 # print them and exit
stoker metrics --hosts cluster.yaml   # several machines from one endpoint, by ssh; an unreachable one has stoker_host_up 0
stoker run --metrics-port 9912 train.py    # those of one run while it runs; port 0 picks a free one and prints it
```

A background loop takes a snapshot every 2 s (`--interval`), and a scrape returns the last one: a driver that hangs never blocks
Prometheus. `stoker_last_collect_timestamp_seconds` then grows old, and `StokerMetricsStale` fires. The server listens on loopback, where
every user of the machine can read it; `--host` listens on another address, without a password. It answers GET for `/metrics` and `/` only,
and on loopback it refuses foreign Host headers. From another machine: `ssh -L 9911:127.0.0.1:9911 box`.

A run is exported while it runs and for 15 minutes after its end. `--metrics-port` starts a child process that ends with the run,
so only a separate `stoker metrics` shows the verdict. Without `--metrics-port` the launcher loads none of this code.

## Prometheus, alerts, Grafana

The repository's `deploy/` has:

- `prometheus.yml` scrapes `stoker metrics` on this machine every 5 s and loads the alerts:
  `prometheus --config.file=deploy/prometheus.yml --storage.tsdb.path="$HOME/prometheus" --web.listen-address=127.0.0.1:9090`.
  Without that address Prometheus, which has no password, shows your runs to the whole network.
- `alerts.yml`: each alert says what to do. Alerts exist for a GPU's Xid errors (48, 62, 64, 74, 79, 95, 119 and 120 critical, 94 a warning,
  never 13, 31, 43, 63 or 92), a lost or throttled GPU, a run that hangs, makes no progress, has a loss that is not finite, has a slow rank,
  restarts repeatedly or failed, a full disk, an unreachable host, failed checks of the doctor, and an exporter that is down or stale.
  `alerts_test.yml` fires each of them: `promtool test rules deploy/alerts_test.yml`.
- `grafana/training.json` and `grafana/gpus.json`: Dashboards → New → Import. Dashboards for dcgm-exporter work as well: `--dcgm classic`
  (the default) exports GPUs under the names that public dashboards use, `--dcgm 4.9` under those of dcgm-exporter 4.9, `off` under neither.
  Values that NVML does not have (`DCGM_FI_PROF_*`) are omitted.

## Messages without Prometheus

`stoker run --notify TARGET` sends one line with the run, its state, step, loss, cause and the command that shows more, when the run ends,
restarts or is refused. Nothing is sent if you stopped the run yourself.

| target | what is used |
|---|---|
| `ntfy://TOPIC` | [ntfy](https://ntfy.sh): a topic that nobody can guess is its password; `ntfy://my.host/TOPIC` or `https://my.host/TOPIC` for your own server |
| `slack:URL` | an incoming webhook of Slack; the URL alone works too |
| `discord:URL` | a webhook of Discord; the URL alone works too |
| `mailto:ADDRESS` | `$STOKER_SMTP` (`smtp://user:password@host:587` or `smtps://…:465`) if it is set, else the `sendmail` program |
| anything else | a shell command: it gets the verdict as JSON on its stdin, also for a run that you stopped |

A message that fails is reported in one line and changes nothing; at most 30 s are spent on it. Topics, webhooks and passwords are never
written to the record or the console (`stoker docs secrets`).

## Every metric

Units are base units; `NaN` and infinity are exported as such. An unknown value has no series. Labels never hold a step or a pid.
"""


def page() -> str:
    """Return docs/metrics.md."""
    parts = [_HEAD]
    for title, specs in GROUPS.items():
        parts.append(f"\n### {title}\n\n| metric | labels | unit | meaning |\n|---|---|---|---|\n")
        for spec in specs:
            labels = ", ".join(f"`{label}`" for label in spec.labels)
            kind = " (counter)" if spec.kind == COUNTER else ""
            parts.append(f"| `{spec.name}`{kind} | {labels} | {spec.unit} | {spec.text} |\n")
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
