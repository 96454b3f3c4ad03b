// Runs a client's checks one after the other and prints which features pass: `node CLIENT.mjs BASE_URL`.
export const URL = process.argv[2];

export async function run(checks) {
  let failed = false;
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
      console.log("ok", name);
    } catch (error) {
      failed = true;
      console.log("FAILED", name, error.stack?.slice(0, 3000), error.responseBody ?? "");
    }
  }
  process.exit(failed ? 1 : 0);
}
