-- Enter a group, or start a newer attempt of an open one.
-- Keys: group:<id> hash, trajectory:<id> hash, groups set, active zset, live set, gone sets (read),
--       ledger hash, tally hash.
-- ARGV: "admit" | "reorder", group, attempt, order bytes, member ids ...
-- Returns 1 if done, 0 if it was known already (admit) or is not newer or not open (reorder).
local mode, group, attempt, order = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local members = {}
for i = 5, #ARGV do members[#members + 1] = ARGV[i] end
local hash = key('group', group)
local known = call('SISMEMBER', base .. 'groups', group) == 1

if mode == 'admit' then
  if known then return 0 end
  for _, id in ipairs(members) do
    if call('EXISTS', key('trajectory', id)) == 1 or gone_as(id) then
      return invalid('member ' .. id .. ' of group ' .. group .. ' belongs to another group')
    end
  end
  call('SADD', base .. 'groups', group)
  call('ZADD', base .. 'active', call('SCARD', base .. 'groups'), group)
  enter(group, 'open')
  call('HSET', hash, 'attempt', attempt, 'order', order, 'members', cmsgpack.pack(members))
  for _, id in ipairs(members) do
    call('HSET', key('trajectory', id), 'group', group, 'state', 'pending')
    call('SADD', base .. 'live', id)
  end
  call('HINCRBY', base .. 'ledger', 'admitted', #members)
  call('HINCRBY', base .. 'ledger', 'pending', #members)
  return 1
end

if not known then return unknown(group, attempt) end
local facts = call('HMGET', hash, 'state', 'attempt', 'members')
if facts[1] ~= 'open' or attempt <= tonumber(facts[2]) then return 0 end
if facts[3] ~= cmsgpack.pack(members) then
  return invalid('attempt ' .. attempt .. ' of group ' .. group .. ' names other members than before')
end
call('HSET', hash, 'attempt', attempt, 'order', order)
for _, id in ipairs(members) do
  if call('HGET', key('trajectory', id), 'state') == 'pending' then
    call('DEL', key('trajectory', id)) -- earlier turns and ends
    call('HSET', key('trajectory', id), 'group', group, 'state', 'pending')
  end
end
return 1
