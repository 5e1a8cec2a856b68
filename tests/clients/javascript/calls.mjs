// Calls of each JavaScript client, by name. Prints one line of JSON for each: its name, and its result or its error.
// Arguments: JSON with the server's url, a key, the texts and a query.

const { url, key, texts, query } = JSON.parse(process.argv[2]);

const calls = {
  "openai, base64": async () => {
    const { default: OpenAI } = await import("openai");
    const client = new OpenAI({ apiKey: key, baseURL: `${url}/v1`, maxRetries: 0 });
    const found = await client.embeddings.create({ model: "embedder", input: texts });
    return found.data.map((row) => Array.from(row.embedding));
  },
  "openai, floats": async () => {
    const { default: OpenAI } = await import("openai");
    const client = new OpenAI({ apiKey: key, baseURL: `${url}/v1`, maxRetries: 0 });
    const found = await client.embeddings.create({ model: "embedder", input: texts, encoding_format: "float" });
    return found.data.map((row) => row.embedding);
  },
  "openai, an error": async () => {
    const { default: OpenAI, NotFoundError } = await import("openai");
    const client = new OpenAI({ apiKey: key, baseURL: `${url}/v1`, maxRetries: 0 });
    try {
      await client.embeddings.create({ model: "nobody", input: texts });
    } catch (error) {
      return { known: error instanceof NotFoundError, status: error.status, param: error.param };
    }
  },
  ai: async () => {
    const { embedMany } = await import("ai");
    const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
    const provider = createOpenAICompatible({ name: "staged-pool", apiKey: key, baseURL: `${url}/v1` });
    const found = await embedMany({ model: provider.textEmbeddingModel("embedder"), values: texts, maxRetries: 0 });
    return found.embeddings;
  },
  "ai, one": async () => {
    const { embed } = await import("ai");
    const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
    const provider = createOpenAICompatible({ name: "staged-pool", apiKey: key, baseURL: `${url}/v1` });
    const found = await embed({ model: provider.textEmbeddingModel("embedder"), value: texts[0], maxRetries: 0 });
    return [found.embedding];
  },
  "cohere-ai, vectors": async () => {
    const { CohereClientV2 } = await import("cohere-ai");
    const client = new CohereClientV2({ token: key, environment: url });
    const found = await client.embed(
      { model: "embedder", texts, inputType: "search_document", embeddingTypes: ["float"] },
      { maxRetries: 0 },
    );
    return found.embeddings.float;
  },
  "cohere-ai, ranking": async () => {
    const { CohereClientV2 } = await import("cohere-ai");
    const client = new CohereClientV2({ token: key, environment: url });
    const found = await client.rerank({ model: "ranker", query, documents: texts }, { maxRetries: 0 });
    return found.results.map((one) => [one.index, one.relevanceScore]);
  },
  ollama: async () => {
    const { Ollama } = await import("ollama");
    const client = new Ollama({ host: url, headers: { Authorization: `Bearer ${key}` } });
    const found = await client.embed({ model: "embedder", input: texts });
    return found.embeddings;
  },
  "voyageai, vectors": async () => {
    const { VoyageAIClient } = await import("voyageai");
    const client = new VoyageAIClient({ apiKey: key, environment: `${url}/v1` });
    const found = await client.embed({ model: "embedder", input: texts }, { maxRetries: 0 });
    return found.data.map((row) => row.embedding);
  },
  "voyageai, ranking": async () => {
    const { VoyageAIClient } = await import("voyageai");
    const client = new VoyageAIClient({ apiKey: key, environment: `${url}/v1` });
    const found = await client.rerank(
      { model: "ranker", query, documents: texts, topK: texts.length }, // tells whose answer is wanted
      { maxRetries: 0 },
    );
    return found.data.map((one) => [one.index, one.relevanceScore]);
  },
  "@huggingface/inference, vectors": async () => {
    const { InferenceClient } = await import("@huggingface/inference");
    const client = new InferenceClient(key).endpoint(`${url}/m/embedder/embed`);
    return await client.featureExtraction({ inputs: texts });
  },
  "@huggingface/inference, labels": async () => {
    const { InferenceClient } = await import("@huggingface/inference");
    const client = new InferenceClient(key).endpoint(`${url}/m/classifier/predict`);
    return await client.textClassification({ inputs: texts[0], parameters: { top_k: 2 } });
  },
  "@langchain/openai": async () => {
    const { OpenAIEmbeddings } = await import("@langchain/openai");
    const client = new OpenAIEmbeddings({
      apiKey: key,
      model: "embedder",
      maxRetries: 0,
      configuration: { baseURL: `${url}/v1` },
    });
    return await client.embedDocuments(texts);
  },
};

for (const [name, call] of Object.entries(calls)) {
  try {
    console.log(JSON.stringify({ name, result: await call() }));
  } catch (error) {
    console.log(JSON.stringify({ name, error: `${error.name}: ${error.message}`.slice(0, 500) }));
  }
}
process.exit(0);
