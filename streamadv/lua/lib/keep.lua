-- Kept: a group that has ended may go to the stream `kept` instead of being deleted, so that people can look at it. It
-- is no state of a trajectory: the ledger counts the group as if it were gone. `has_memory` is false above maxmemory,
-- where nothing new is kept; scripts.py sets it in front of every script with the key `kept`. A run with an archive keeps
-- every group, however much that is: admission waits for the archive (lib/admit).
-- KEYS  kept, ledger, trainer
local KINDS = {trained = 2, dropped = 3, eval = 4, dead = 5}
local keeping  -- what `trim_kept` has written: bytes of the shard, a share for each kind, and ' archive' if the run has one

-- Whether the run keeps groups that end as one of KINDS.
local function keeps(kind)
  keeping = keeping or {string.match(redis.call('HGET', keys.trainer, 'keep') or '', '^(%d+) (%S+) (%S+) (%S+) (%S+)(.*)$')}
  return (has_memory or keeping[6] == ' archive') and (tonumber(keeping[KINDS[kind]] or '') or 0) > 0
end

-- Whether this group is among those kept: by a hash of its id alone, as `is_kept` in run/kept.py says too. Without
-- the squares, ids that differ in one digit would lie one fixed step apart. Products stay below 2^53.
local function is_chosen(kind, group_id)
  if not keeps(kind) then return false end
  local hash = 0
  for i = 1, #group_id do hash = (16777619 * hash + string.byte(group_id, i)) % 67108859 end
  hash = (hash * hash + 16777619) % 67108859
  return hash * hash % 67108859 < keeping[KINDS[kind]] * 67108859
end

-- Keep a group if it is chosen and there is room. fields: of its entry in the groups log; more: of the entry in `kept`.
-- Returns the bytes of its payloads, which then belong to this entry, or nil.
local function keep(kind, outcome, fields, more)
  local entry, named, bytes, payloads = {'outcome', outcome}, {}, 0, 0
  for _, list in ipairs({fields, more}) do
    for i = 1, #list, 2 do
      named[list[i]], entry[#entry + 1], entry[#entry + 2] = list[i + 1], list[i], list[i + 1]
      bytes = bytes + #list[i + 1]
    end
  end
  if not is_chosen(kind, named.group_id or '') then return nil end
  for size in string.gmatch(named.payloads or '', '%S+ (%d+) %d+ %S+') do payloads = payloads + tonumber(size) end
  bytes = bytes + payloads
  local used = tonumber(redis.call('HGET', keys.ledger, 'kept_bytes') or '') or 0
  if used + bytes > tonumber(keeping[1]) and keeping[6] ~= ' archive' then return nil end
  local id = redis.pcall('XADD', keys.kept, '*', 'bytes', string.format('%d', bytes), unpack(entry))
  if id.err then return nil end
  redis.pcall('HINCRBY', keys.ledger, 'kept_bytes', string.format('%d', bytes))
  return payloads
end
