// Registered datasets: their size, the job that built each version, and what was made of it.
import { get } from "../api";
import { num, percent } from "../format";
import { useLive } from "../live";
import { Table, type Column } from "../table";
import { Card, Empty, Pairs, Problem, Skeleton, State, useLoad, When } from "../ui";
import { PageHead } from "./head";

interface Version {
  version: number;
  user: string;
  created_at_s: number;
  spec: { name: string; team: string; location: string; job: string; documents: number; tokens: number; vocab_size: number; read: number; dropped: Record<string, number> };
}

interface Dataset {
  name: string;
  team: string;
  versions: number;
  newest: Version;
}

interface Uses {
  jobs: string[];
  models: string[];
}

const COLUMNS: Column<Dataset>[] = [
  {
    key: "name",
    title: "Dataset",
    width: "minmax(100px, 1.2fr)",
    sort: (dataset) => dataset.name,
    cell: (dataset) => (
      <a class="strong" href={`#/models?dataset=${dataset.name}`}>
        {dataset.name}
      </a>
    ),
  },
  { key: "team", title: "Team", width: "minmax(70px, 0.8fr)", from: "medium", sort: (dataset) => dataset.team, cell: (dataset) => dataset.team },
  { key: "versions", title: "Versions", width: "64px", end: true, sort: (dataset) => dataset.versions, cell: (dataset) => num(dataset.versions) },
  { key: "documents", title: "Documents", width: "80px", end: true, from: "medium", sort: (dataset) => dataset.newest.spec.documents, cell: (dataset) => num(dataset.newest.spec.documents) },
  { key: "tokens", title: "Tokens", width: "64px", end: true, sort: (dataset) => dataset.newest.spec.tokens, cell: (dataset) => num(dataset.newest.spec.tokens) },
  { key: "job", title: "Built by", width: "minmax(80px, 0.7fr)", from: "medium", sort: (dataset) => dataset.newest.spec.job, cell: (dataset) => <Builder job={dataset.newest.spec.job} /> },
  { key: "newest", title: "Newest", width: "minmax(130px, 1fr)", from: "medium", sort: (dataset) => dataset.newest.created_at_s, cell: (dataset) => <Registered version={dataset.newest} /> },
];

const VERSION_COLUMNS: Column<Version>[] = [
  { key: "version", title: "Version", width: "minmax(56px, 0.5fr)", sort: (version) => version.version, cell: (version) => <span class="strong">{version.version}</span> },
  { key: "documents", title: "Documents", width: "80px", end: true, sort: (version) => version.spec.documents, cell: (version) => num(version.spec.documents) },
  { key: "tokens", title: "Tokens", width: "64px", end: true, sort: (version) => version.spec.tokens, cell: (version) => num(version.spec.tokens) },
  { key: "job", title: "Built by", width: "minmax(64px, 0.7fr)", sort: (version) => version.spec.job, cell: (version) => <Builder job={version.spec.job} /> },
  { key: "registered", title: "Registered", width: "minmax(130px, 1fr)", from: "medium", sort: (version) => version.created_at_s, cell: (version) => <Registered version={version} /> },
];

export function Datasets() {
  const { data, error } = useLoad((signal) => get<Dataset[]>("/v1/datasets", { limit: 500 }, signal), [], 10_000);
  return (
    <>
      <Card title="Datasets" cmd="raytide data list" flush>
        {error && !data ? (
          <Problem error={error} />
        ) : !data ? (
          <Skeleton height={120} />
        ) : data.length === 0 ? (
          <Empty title="No dataset is registered" cmd="raytide data build data.yaml">
            A build turns text into token shards, which trainings read, and registers them.
          </Empty>
        ) : (
          <Table label="Datasets" columns={COLUMNS} rows={data} id={(dataset) => dataset.name} href={(dataset) => `#/models?dataset=${dataset.name}`} search={(dataset) => `${dataset.name} ${dataset.team} ${dataset.newest.spec.job} ${dataset.newest.user}`} height={460} />
        )}
      </Card>
      <Builds />
    </>
  );
}

const Registered = ({ version }: { version: Version }) => (
  <>
    <When at={version.created_at_s} /> <span class="faint">by {version.user}</span>
  </>
);

const Builder = ({ job }: { job: string }) =>
  job ? (
    <a class="link" href={`#/runs/${job}`}>
      {job}
    </a>
  ) : (
    <span class="faint">not by a job</span>
  );

/** The builds that run, or ended a short while ago. */
function Builds() {
  const builds = [...useLive().jobs.values()].filter((job) => job.kind === "data");
  if (builds.length === 0) return null;
  return (
    <Card title="Builds" cmd="raytide ps" flush>
      <ul class="list">
        {builds.map((job) => (
          <li key={job.id}>
            <span class="grow">
              <a class="strong" href={`#/runs/${job.id}`}>
                {job.name}
              </a>{" "}
              <span class="faint">{job.id}</span>
            </span>
            <State of={job.state} />
            <When at={job.submitted_at_s} />
          </li>
        ))}
      </ul>
    </Card>
  );
}

export function OneDataset({ name }: { name: string }) {
  const versions = useLoad((signal) => get<Version[]>(`/v1/datasets/${name}/versions`, { limit: 100 }, signal), [name], 10_000);
  const newest = versions.data?.[0];
  const number = newest?.version;
  const uses = useLoad((signal) => (number ? get<Uses>(`/v1/datasets/${name}/versions/${number}/uses`, {}, signal) : Promise.resolve(null)), [name, number], 10_000);
  return (
    <>
      <PageHead title={name} crumb={["Models", "#/models"]} sub={newest && `dataset of team ${newest.spec.team}`} />
      {versions.error && !versions.data ? (
        <Card title="No such dataset">
          <Problem error={versions.error} />
        </Card>
      ) : !newest ? (
        <Skeleton height={300} />
      ) : (
        <div class="grid">
          <Card title="Lineage of the newest version" cmd={`raytide data show ${name}:${number}`}>
            {uses.data ? <Lineage version={newest} uses={uses.data} /> : uses.error ? <Problem error={uses.error} /> : <Skeleton height={56} />}
          </Card>
          <Card title="Newest version" cmd={`raytide data show ${name}:${number}`}>
            <Pairs
              rows={[
                ["Location", newest.spec.location],
                ["Documents", newest.spec.read ? `${num(newest.spec.documents)} of ${num(newest.spec.read)} read` : num(newest.spec.documents)],
                ["Tokens", num(newest.spec.tokens)],
                ["Vocabulary", num(newest.spec.vocab_size)],
                ...Object.entries(newest.spec.dropped).map(([reason, count]) => [`Dropped: ${reason}`, `${num(count)} (${percent(newest.spec.read ? count / newest.spec.read : null, 1)})`] as [string, string]),
              ]}
            />
          </Card>
          <Card title="Versions" cmd={`raytide data show ${name}`} flush>
            <Table label="Versions" columns={VERSION_COLUMNS} rows={versions.data!} id={(version) => String(version.version)} search={(version) => `${version.version} ${version.spec.job} ${version.user}`} height={460} />
          </Card>
        </div>
      )}
    </>
  );
}

function Lineage({ version, uses }: { version: Version; uses: Uses }) {
  const { name, job } = version.spec;
  return (
    <ol class="lineage">
      {job && (
        <li>
          <a class="box" href={`#/runs/${job}`}>
            <small>Build</small>
            <span class="clip">{job}</span>
          </a>
        </li>
      )}
      <li>
        <div class="box">
          <small>Dataset</small>
          <span class="clip">
            {name}:{version.version}
          </span>
        </div>
      </li>
      {uses.jobs.length > 0 && (
        <li>
          <div class="box">
            <small>Read by</small>
            <Names names={uses.jobs} href={(id) => `#/runs/${id}`} />
          </div>
        </li>
      )}
      {uses.models.length > 0 && (
        <li>
          <div class="box">
            <small>Models</small>
            <Names names={uses.models} href={(id) => `#/models/${id.split(":")[0]}`} />
          </div>
        </li>
      )}
    </ol>
  );
}

const MOST_NAMES = 12;

const Names = ({ names, href }: { names: string[]; href: (name: string) => string }) => (
  <span>
    {names.slice(0, MOST_NAMES).map((each, index) => (
      <>
        {index > 0 && ", "}
        <a class="link" href={href(each)}>
          {each}
        </a>
      </>
    ))}
    {names.length > MOST_NAMES && ` and ${num(names.length - MOST_NAMES)} more`}
  </span>
);
