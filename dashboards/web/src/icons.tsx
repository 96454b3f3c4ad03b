// Sixteen-pixel line icons, drawn for the page.
const PATHS: Record<string, string> = {
  now: "M1.5 10c2 0 2-3 4-3s2 3 4 3 2-3 5-3M1.5 13.5c2 0 2-3 4-3s2 3 4 3 2-3 5-3M8 1.5v3M3.5 3l1.5 1.5M12.5 3 11 4.5",
  capacity: "M2 2.5h5v5H2zM9 2.5h5v5H9zM2 9.5h5v4H2zM9 9.5h5v4H9z",
  queue: "M2 3.5h12M2 8h9M2 12.5h6",
  runs: "M2 2v12h12M4.5 11c1-6 3-1 4.5-4s2.5-2.5 5-4",
  endpoints: "M3 8a5 5 0 0 1 10 0M5.5 8a2.5 2.5 0 0 1 5 0M8 8v6M5 14h6",
  cost: "M8 1.5v13M11.5 4.5c-.8-1-2-1.5-3.5-1.5-2 0-3.3 1-3.3 2.5 0 3.4 7 1.6 7 5 0 1.6-1.5 2.5-3.7 2.5-1.7 0-3-.6-3.8-1.7",
  models: "M8 1.5 14 5v6l-6 3.5L2 11V5zM2 5l6 3.5L14 5M8 8.5v6",
  alerts: "M8 2a4 4 0 0 0-4 4v3l-1.5 2.5h11L12 9V6a4 4 0 0 0-4-4zM6.5 13.5a1.6 1.6 0 0 0 3 0",
  sun: "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6zM8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15M3 3l1 1M12 12l1 1M13 3l-1 1M4 12l-1 1",
  moon: "M13.5 9.5A6 6 0 0 1 6.5 2.5a6 6 0 1 0 7 7z",
  help: "M8 14.5a6.5 6.5 0 1 0 0-13 6.5 6.5 0 0 0 0 13zM6 6.2c.2-1.2 1-1.8 2.1-1.8 1.2 0 2 .7 2 1.7 0 1.5-2.1 1.6-2.1 3.2M8 11.6v.1",
  search: "M7 12A5 5 0 1 0 7 2a5 5 0 0 0 0 10zM10.6 10.6 14.5 14.5",
  out: "M6 14H2.5V2H6M10.5 11 14 8l-3.5-3M14 8H6",
};

export function Icon({ name }: { name: string }) {
  return (
    <svg viewBox="0 0 16 16" fill="none" stroke="currentColor" stroke-width="1.4" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}
