// What fires, what was done about it, and whether the probes get the answers they know.
import { get } from "../api";
import { num, plural, span } from "../format";
import { useLive } from "../live";
import type { Place } from "../routes";
import type { Alert } from "../types";
import { Card, Empty, Problem, Skeleton, State, useLoad, When } from "../ui";
import { PageHead } from "./head";

interface Action {
  key: string;
  at_s: number;
  alert: string;
  kind: string;
  object: string;
  state: string;
  outcome: string;
  ended_at_s: number | null;
}

interface Episode {
  at_s: number;
  name: string;
  labels: Record<string, string>;
  state: string;
  summary: string;
}

interface Probe {
  endpoint: string;
  probe: string;
  success?: boolean;
  right?: boolean;
  seconds?: number;
  at_s?: number;
  error?: string;
}

const labelText = (labels: Record<string, string>) =>
  Object.entries(labels)
    .map(([name, value]) => `${name}=${value}`)
    .join(" ");

export function Alerts(_: { at: Place }) {
  const now = useLive();
  const alerts = now.alerts ? [...now.alerts.values()] : null;
  const live = (alerts ?? []).filter((alert) => alert.state !== "resolved").sort((a, b) => (a.state === b.state ? b.since_s - a.since_s : a.state === "firing" ? -1 : 1));
  const isAll = now.hello?.team === "*";
  const actions = useLoad((signal) => (isAll ? get<Action[]>("/v1/alerts/actions", { limit: 50 }, signal) : Promise.resolve([])), [isAll], 10_000);
  const episodes = useLoad((signal) => get<Episode[]>("/v1/alerts/history", { limit: 60 }, signal), [], 10_000);
  const probes = useLoad((signal) => get<Probe[]>("/v1/probes", {}, signal), [], 10_000);
  return (
    <>
      <PageHead title="Alerts" sub={alerts && (live.length ? `${plural(live.filter((alert) => alert.state === "firing").length, "alert")} firing` : "all quiet")} />
      <div class="grid">
        <Card title="Firing and pending" cmd="raytide alerts list" flush>
          {!now.status || !alerts ? <Skeleton height={120} /> : live.length === 0 ? <Empty title="No alert fires">Rules watch clients, endpoints, models, trainings, nodes and costs; what they find appears here.</Empty> : <AlertList alerts={live} />}
        </Card>
        <div class="half">
          <Card title="What was done" cmd="raytide alerts history --actions" flush>
            {!isAll ? (
              <Empty title="Actions touch every team">A token for all teams shows them.</Empty>
            ) : actions.error && !actions.data ? (
              <Problem error={actions.error} />
            ) : !actions.data ? (
              <Skeleton height={120} />
            ) : actions.data.length === 0 ? (
              <Empty title="No alert has acted yet">cluster.yaml says which alert may restart a replica, replace a node or run a command: metadata.raytide.monitoring.actions.</Empty>
            ) : (
              <ul class="list" style={{ maxHeight: "420px", overflow: "auto" }} tabIndex={0} aria-label="Actions">
                {actions.data.map((action) => (
                  <li key={`${action.key}-${action.at_s}`}>
                    <span class="grow">
                      <span class="strong">{action.kind.replaceAll("_", " ")}</span> {action.object}
                      <span class="sub-line" title={action.outcome}>
                        for {action.alert}
                        {action.outcome && `: ${action.outcome}`}
                      </span>
                    </span>
                    <State of={action.state} />
                    <When at={action.at_s} />
                  </li>
                ))}
              </ul>
            )}
          </Card>
        </div>
        <div class="half">
          <Card title="Probes" cmd="raytide alerts probes" flush>
            {probes.error && !probes.data ? (
              <Problem error={probes.error} />
            ) : !probes.data ? (
              <Skeleton height={120} />
            ) : probes.data.length === 0 ? (
              <Empty title="No endpoint is probed">A probe asks a known question and checks the answer: metadata.raytide.monitoring.probes.</Empty>
            ) : (
              <ul class="list">
                {probes.data.map((probe) => (
                  <li key={`${probe.endpoint}-${probe.probe}`}>
                    <span class="grow">
                      <a class="strong" href={`#/endpoints/${probe.endpoint}`}>
                        {probe.endpoint}
                      </a>{" "}
                      <span class="quiet">{probe.probe}</span>
                      {probe.error && <span class="sub-line">{probe.error}</span>}
                    </span>
                    {probe.seconds != null && <span class="quiet">{span(probe.seconds)}</span>}
                    <State of={probe.success === false ? "failed" : probe.right === false ? "warning" : "running"} title={probe.right === false ? "the answer was wrong" : ""} />
                    {probe.at_s != null && <When at={probe.at_s} />}
                  </li>
                ))}
              </ul>
            )}
          </Card>
        </div>
        <Card title="History" cmd="raytide alerts history" flush>
          {episodes.error && !episodes.data ? (
            <Problem error={episodes.error} />
          ) : !episodes.data ? (
            <Skeleton height={120} />
          ) : episodes.data.length === 0 ? (
            <Empty title="No alert has fired yet" cmd="raytide alerts test NodeLost">
              A test tells the receivers, and acts on nothing.
            </Empty>
          ) : (
            <ul class="list" style={{ maxHeight: "420px", overflow: "auto" }} tabIndex={0} aria-label="History">
              {episodes.data.map((episode, index) => (
                <li key={index}>
                  <span class="grow">
                    <span class="strong">{episode.name}</span> <span class="faint">{labelText(episode.labels)}</span>
                    <span class="sub-line">{episode.summary}</span>
                  </span>
                  <State of={episode.state} />
                  <When at={episode.at_s} />
                </li>
              ))}
            </ul>
          )}
        </Card>
      </div>
    </>
  );
}

function AlertList({ alerts }: { alerts: Alert[] }) {
  return (
    <ul class="list states">
      {alerts.map((alert) => (
        <li key={`${alert.name}-${labelText(alert.labels)}`}>
          <State of={alert.state} />
          <span class="grow">
            <span class={`strong ${alert.state === "firing" ? "bad-text" : ""}`}>{alert.name}</span> <span class={`chip ${alert.severity === "critical" ? "bad" : "warn"}`}>{alert.severity}</span> {alert.silenced && <span class="chip">silenced</span>}{" "}
            <span class="faint">{labelText(alert.labels)}</span>
            <span class="sub-line" title={alert.summary}>
              {alert.summary} {alert.page && (/^https?:/.test(alert.page) ? <a class="link" href={alert.page} rel="noreferrer">What to do</a> : <>See {alert.page}.</>)}
            </span>
            {alert.action && (
              <span class="sub-line">
                {alert.action.do.replaceAll("_", " ")}: {alert.action.state} {alert.action.outcome}
              </span>
            )}
          </span>
          {alert.value != null && (
            <span class="quiet from-medium" title="the value of the rule's expression">
              {num(alert.value)}
            </span>
          )}
          <When at={alert.since_s} />
        </li>
      ))}
    </ul>
  );
}
