// The API's client: every request carries the token, every error has the API's own words.

const TOKEN = "raytide.token";

export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly hint: string,
  ) {
    super(message);
  }
}

export const token = {
  get: () => sessionStorage.getItem(TOKEN) ?? "",
  set: (value: string) => sessionStorage.setItem(TOKEN, value),
  clear: () => sessionStorage.removeItem(TOKEN),
};

let signOut = () => {};
export const onSignOut = (react: () => void) => (signOut = react);

export async function request(path: string, signal?: AbortSignal): Promise<Response> {
  const response = await fetch(path, { signal, headers: { Authorization: `Bearer ${token.get()}` }, cache: "no-store" });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const error = body?.error ?? {};
  if (response.status === 401) signOut();
  throw new ApiError(response.status, error.code ?? "", error.message ?? `HTTP ${response.status}`, error.hint ?? "");
}

export async function get<T>(path: string, query: Record<string, string | number> = {}, signal?: AbortSignal): Promise<T> {
  const search = new URLSearchParams(Object.entries(query).map(([name, value]) => [name, String(value)])).toString();
  return (await request(search ? `${path}?${search}` : path, signal)).json() as Promise<T>;
}
