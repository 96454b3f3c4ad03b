// The pages, and where the address says the reader is.
import { useEffect, useState } from "preact/hooks";

export interface PageInfo {
  id: string;
  title: string;
  key: string;
}

export const PAGES: PageInfo[] = [
  { id: "now", title: "Now", key: "n" },
  { id: "capacity", title: "Capacity", key: "c" },
  { id: "queue", title: "Queue", key: "q" },
  { id: "runs", title: "Runs", key: "r" },
  { id: "endpoints", title: "Endpoints", key: "e" },
  { id: "cost", title: "Cost", key: "o" },
  { id: "models", title: "Models", key: "m" },
  { id: "alerts", title: "Alerts", key: "a" },
];

export interface Place {
  page: string;
  rest: string;
  query: URLSearchParams;
}

export function place(): Place {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [page, ...rest] = path.split("/");
  return { page: page || "now", rest: decodeURIComponent(rest.join("/")), query: new URLSearchParams(search) };
}

export function usePlace(): Place {
  const [at, setAt] = useState(place);
  useEffect(() => {
    const react = () => setAt(place());
    addEventListener("hashchange", react);
    return () => removeEventListener("hashchange", react);
  }, []);
  return at;
}
