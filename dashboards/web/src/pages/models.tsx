// Registered models: versions, aliases and who moved them, and the line from data over a run to what is served.
import { get } from "../api";
import { num, plural } from "../format";
import { useLive } from "../live";
import type { Place } from "../routes";
import { Card, Empty, Pairs, Problem, Skeleton, useLoad, When } from "../ui";
import { PageHead } from "./head";

interface Version {
  version: number;
  user: string;
  created_at_s: number;
  spec: { name: string; team: string; location: string; note: string; metrics: Record<string, number>; lineage: { job: string; dataset: string; base: string; code: string } };
}

interface Model {
  name: string;
  team: string;
  versions: number;
  newest: Version;
  aliases: Record<string, number>;
}

interface Change {
  number: number;
  alias: string;
  before: number | null;
  after: number | null;
  at_s: number;
  user: string;
  why: string;
}

export function Models({ at }: { at: Place }) {
  return at.rest ? <OneModel name={at.rest} key={at.rest} /> : <AllModels />;
}

const aliasesOf = (aliases: Record<string, number>, version?: number) =>
  Object.entries(aliases)
    .filter(([, number]) => version === undefined || number === version)
    .map(([alias, number]) => (
      <span class="chip accent" key={alias}>
        {alias}
        {version === undefined && ` ${number}`}
      </span>
    ));

function AllModels() {
  const { data, error } = useLoad((signal) => get<Model[]>("/v1/models", { limit: 500 }, signal), [], 10_000);
  const now = useLive();
  return (
    <>
      <PageHead title="Models" sub={data && plural(data.length, "model")} />
      <div class="grid">
        <Card title="Registered models" cmd="raytide model list" flush>
          {error && !data ? (
            <Problem error={error} />
          ) : !data ? (
            <Skeleton height={240} />
          ) : data.length === 0 ? (
            <Empty title="No model is registered" cmd="raytide model register NAME DIRECTORY">
              Versions never change; an alias such as champion names the one that is served.
            </Empty>
          ) : (
            <div class="scroll" role="group" aria-label="Table" tabIndex={0}>
              <table class="plain">
                <thead>
                  <tr>
                    <th>Model</th>
                    <th class="from-medium">Team</th>
                    <th class="end">Versions</th>
                    <th>Aliases</th>
                    <th class="from-medium">Newest</th>
                    <th class="from-medium">Served as</th>
                  </tr>
                </thead>
                <tbody>
                  {data.map((model) => (
                    <tr key={model.name}>
                      <td>
                        <a class="strong" href={`#/models/${model.name}`}>
                          {model.name}
                        </a>
                      </td>
                      <td class="from-medium">{model.team}</td>
                      <td class="end">{num(model.versions)}</td>
                      <td>{Object.keys(model.aliases).length ? aliasesOf(model.aliases) : <span class="faint">none</span>}</td>
                      <td class="from-medium">
                        <When at={model.newest.created_at_s} /> <span class="faint">by {model.newest.user}</span>
                      </td>
                      <td class="from-medium">{[...now.endpoints.values()].filter((e) => e.model.startsWith(`${model.name}:`)).map((e) => <a class="link" key={e.id} href={`#/endpoints/${e.id}`}>{e.id} </a>)}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
          )}
        </Card>
        <Datasets />
      </div>
    </>
  );
}

/** Builds and trainings name their datasets; together they are the line from data to models. */
function Datasets() {
  const now = useLive();
  const builds = [...now.jobs.values()].filter((job) => job.kind === "data");
  return (
    <Card title="Dataset builds" cmd="raytide ps" flush>
      {!now.status ? (
        <Skeleton height={90} />
      ) : builds.length === 0 ? (
        <Empty title="No build ran lately" cmd="raytide data build data.yaml">
          A build turns text into token shards, which trainings read.
        </Empty>
      ) : (
        <ul class="list">
          {builds.map((job) => (
            <li key={job.id}>
              <span class="grow">
                <a class="strong" href={`#/runs/${job.id}`}>
                  {job.name}
                </a>{" "}
                <span class="faint">{job.id}</span>
              </span>
              <span class="quiet">{job.state}</span>
              <When at={job.submitted_at_s} />
            </li>
          ))}
        </ul>
      )}
    </Card>
  );
}

function OneModel({ name }: { name: string }) {
  const now = useLive();
  const model = useLoad((signal) => get<Model>(`/v1/models/${name}`, {}, signal), [name], 10_000);
  const versions = useLoad((signal) => get<Version[]>(`/v1/models/${name}/versions`, { limit: 100 }, signal), [name], 10_000);
  const history = useLoad((signal) => get<Change[]>(`/v1/models/${name}/history`, { limit: 50 }, signal), [name], 10_000);
  if (model.error && !model.data)
    return (
      <>
        <PageHead title={name} crumb={["Models", "#/models"]} />
        <Card title="No such model">
          <Problem error={model.error} />
        </Card>
      </>
    );
  const served = (version: number) => [...now.endpoints.values()].filter((endpoint) => endpoint.model === `${name}:${version}`);
  const metrics = [...new Set((versions.data ?? []).flatMap((version) => Object.keys(version.spec.metrics)))].slice(0, 5);
  return (
    <>
      <PageHead title={name} crumb={["Models", "#/models"]} sub={model.data && <>team {model.data.team} {aliasesOf(model.data.aliases)}</>} />
      <div class="grid">
        {model.data && (
          <Card title="Lineage of the newest version" cmd={`raytide model show ${name}:${model.data.newest.version}`}>
            <Lineage version={model.data.newest} served={served(model.data.newest.version).map((endpoint) => endpoint.id)} />
          </Card>
        )}
        <Card title="Versions" cmd={`raytide model show ${name}`} flush>
          {!versions.data ? (
            <Skeleton height={160} />
          ) : (
            <div class="scroll" role="group" aria-label="Table" tabIndex={0}>
              <table class="plain">
                <thead>
                  <tr>
                    <th>Version</th>
                    <th>Aliases</th>
                    <th>Trained by</th>
                    {metrics.map((metric) => (
                      <th class="end" key={metric}>
                        {metric}
                      </th>
                    ))}
                    <th>Registered</th>
                    <th>Served as</th>
                  </tr>
                </thead>
                <tbody>
                  {versions.data.map((version) => (
                    <tr key={version.version}>
                      <td class="strong">{version.version}</td>
                      <td>{aliasesOf(model.data?.aliases ?? {}, version.version)}</td>
                      <td>{version.spec.lineage.job ? <a class="link" href={`#/runs/${version.spec.lineage.job}`}>{version.spec.lineage.job}</a> : <span class="faint">not by a job</span>}</td>
                      {metrics.map((metric) => (
                        <td class="end" key={metric}>
                          {num(version.spec.metrics[metric])}
                        </td>
                      ))}
                      <td>
                        <When at={version.created_at_s} /> <span class="faint">by {version.user}</span>
                        {version.spec.note && <span class="sub-line">{version.spec.note}</span>}
                      </td>
                      <td>{served(version.version).map((endpoint) => <a class="link" key={endpoint.id} href={`#/endpoints/${endpoint.id}`}>{endpoint.id} </a>)}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
          )}
        </Card>
        <Card title="Which version was what, and when" cmd={`raytide model history ${name}`} flush>
          {!history.data ? (
            <Skeleton height={100} />
          ) : history.data.length === 0 ? (
            <Empty title="No alias was given yet" cmd={`raytide model promote ${name}:1 --as champion`} />
          ) : (
            <ul class="list">
              {history.data.map((change) => (
                <li key={change.number}>
                  <span class="chip accent">{change.alias}</span>
                  <span class="grow">
                    {change.before ?? "nothing"} → <b>{change.after ?? "nothing"}</b> <span class="quiet">{change.why}</span>
                  </span>
                  <span class="quiet">{change.user}</span>
                  <When at={change.at_s} />
                </li>
              ))}
            </ul>
          )}
        </Card>
        {model.data && (
          <Card title="Newest version" cmd={`raytide model verify ${name}:${model.data.newest.version}`}>
            <Pairs
              rows={[
                ["Location", model.data.newest.spec.location],
                ["Note", model.data.newest.spec.note || "–"],
                ...Object.entries(model.data.newest.spec.metrics).map(([metric, value]) => [metric, num(value)] as [string, string]),
              ]}
            />
          </Card>
        )}
      </div>
    </>
  );
}

function Lineage({ version, served }: { version: Version; served: string[] }) {
  const { lineage, name } = version.spec;
  const last = (path: string) => path.split("/").filter(Boolean).slice(-2).join("/");
  return (
    <ol class="lineage">
      {lineage.dataset && (
        <li>
          <div class="box" title={lineage.dataset}>
            <small>Dataset</small>
            <span class="clip">{last(lineage.dataset)}</span>
          </div>
        </li>
      )}
      {lineage.base && (
        <li>
          <div class="box" title={lineage.base}>
            <small>Base model</small>
            <span class="clip">{last(lineage.base)}</span>
          </div>
        </li>
      )}
      {lineage.job && (
        <li>
          <a class="box" href={`#/runs/${lineage.job}`}>
            <small>Run{lineage.code && `, ${lineage.code}`}</small>
            <span class="clip">{lineage.job}</span>
          </a>
        </li>
      )}
      <li>
        <div class="box">
          <small>Version</small>
          <span class="clip">
            {name}:{version.version}
          </span>
        </div>
      </li>
      {served.map((endpoint) => (
        <li key={endpoint}>
          <a class="box" href={`#/endpoints/${endpoint}`}>
            <small>Endpoint</small>
            <span class="clip">{endpoint}</span>
          </a>
        </li>
      ))}
    </ol>
  );
}
