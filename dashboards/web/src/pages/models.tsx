// Registered models: versions, aliases and who moved them, and the line from data over a run to what is served; datasets.
import { get } from "../api";
import { num, plural } from "../format";
import { useLive } from "../live";
import type { Place } from "../routes";
import { Table, type Column } from "../table";
import type { Endpoint } from "../types";
import { Card, Empty, Pairs, Problem, Skeleton, useLoad, When } from "../ui";
import { Datasets, OneDataset } from "./datasets";
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
  const dataset = at.query.get("dataset");
  if (dataset) return <OneDataset name={dataset} key={dataset} />;
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

const linksTo = (endpoints: Endpoint[]) =>
  endpoints.length ? (
    endpoints.map((endpoint) => (
      <a class="link" key={endpoint.id} href={`#/endpoints/${endpoint.id}`}>
        {endpoint.id}{" "}
      </a>
    ))
  ) : (
    <span class="faint">–</span>
  );

function AllModels() {
  const { data, error } = useLoad((signal) => get<Model[]>("/v1/models", { limit: 500 }, signal), [], 10_000);
  const now = useLive();
  const columns: Column<Model>[] = [
    {
      key: "name",
      title: "Model",
      width: "minmax(100px, 1.2fr)",
      sort: (model) => model.name,
      cell: (model) => (
        <a class="strong" href={`#/models/${model.name}`}>
          {model.name}
        </a>
      ),
    },
    { key: "team", title: "Team", width: "minmax(70px, 0.8fr)", from: "medium", sort: (model) => model.team, cell: (model) => model.team },
    { key: "versions", title: "Versions", width: "64px", end: true, sort: (model) => model.versions, cell: (model) => num(model.versions) },
    { key: "aliases", title: "Aliases", width: "minmax(96px, 1fr)", cell: (model) => (Object.keys(model.aliases).length ? aliasesOf(model.aliases) : <span class="faint">none</span>) },
    {
      key: "newest",
      title: "Newest",
      width: "minmax(130px, 1fr)",
      from: "medium",
      sort: (model) => model.newest.created_at_s,
      cell: (model) => (
        <>
          <When at={model.newest.created_at_s} /> <span class="faint">by {model.newest.user}</span>
        </>
      ),
    },
    { key: "served", title: "Served as", width: "minmax(80px, 1fr)", from: "medium", cell: (model) => linksTo([...now.endpoints.values()].filter((e) => e.model.startsWith(`${model.name}:`))) },
  ];
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
            <Table label="Models" columns={columns} rows={data} id={(model) => model.name} href={(model) => `#/models/${model.name}`} search={(model) => `${model.name} ${model.team} ${Object.keys(model.aliases).join(" ")} ${model.newest.user}`} height={460} />
          )}
        </Card>
        <Datasets />
      </div>
    </>
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
  const columns: Column<Version>[] = [
    { key: "version", title: "Version", width: "52px", sort: (version) => version.version, cell: (version) => <span class="strong">{version.version}</span> },
    { key: "aliases", title: "Aliases", width: "minmax(84px, 1fr)", cell: (version) => aliasesOf(model.data?.aliases ?? {}, version.version) },
    {
      key: "job",
      title: "Trained by",
      width: "minmax(64px, 0.7fr)",
      sort: (version) => version.spec.lineage.job,
      cell: (version) =>
        version.spec.lineage.job ? (
          <a class="link" href={`#/runs/${version.spec.lineage.job}`}>
            {version.spec.lineage.job}
          </a>
        ) : (
          <span class="faint">not by a job</span>
        ),
    },
    ...metrics.map((metric, index): Column<Version> => ({ key: `metric ${metric}`, title: metric, width: "minmax(64px, 0.5fr)", end: true, from: index ? "wide" : undefined, sort: (version) => version.spec.metrics[metric] ?? null, cell: (version) => num(version.spec.metrics[metric]) })),
    {
      key: "registered",
      title: "Registered",
      width: "minmax(130px, 1fr)",
      from: "medium",
      sort: (version) => version.created_at_s,
      cell: (version) => (
        <>
          <When at={version.created_at_s} /> <span class="faint">by {version.user}</span>
          {version.spec.note && <span class="sub-line">{version.spec.note}</span>}
        </>
      ),
    },
    { key: "served", title: "Served as", width: "minmax(80px, 0.8fr)", from: "medium", cell: (version) => linksTo(served(version.version)) },
  ];
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
            <Table label="Versions" columns={columns} rows={versions.data} id={(version) => String(version.version)} search={(version) => `${version.version} ${version.spec.lineage.job} ${version.user} ${version.spec.note}`} height={460} />
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
